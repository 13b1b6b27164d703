"""DSPy: it writes a signature's inputs into one text, so separators around each passage make chunks."""

from collections.abc import Callable

import dspy
from corpus import SEPARATOR, compare, document_text, search


class WholeReply(dspy.ChatAdapter):
    """Takes all of a reply for the answer: small models do not repeat the markers that DSPy looks for."""

    def parse(self, signature, completion):
        return dict.fromkeys(signature.output_fields, completion)


class RAG(dspy.Module):
    def __init__(self):
        super().__init__()
        self.respond = dspy.Predict("context: list[str], question -> answer")

    def forward(self, question: str, best_last: bool):
        found = search(question)[:: -1 if best_last else 1]
        context = [f"{SEPARATOR}{document_text(document)}{SEPARATOR}" for document in found]
        return self.respond(context=context, question=question)


def pipeline(url: str) -> Callable[[str, bool], str]:
    model = dspy.LM(
        "openai/default",
        api_base=f"{url}/v1",
        api_key="none",
        temperature=0,
        max_tokens=16,
        cache=False,
        extra_body={"chunk_separator": SEPARATOR},
    )
    dspy.configure(lm=model, adapter=WholeReply())
    rag = RAG()
    return lambda question, best_last: rag(question=question, best_last=best_last).answer


if __name__ == "__main__":
    compare(__doc__, pipeline)
