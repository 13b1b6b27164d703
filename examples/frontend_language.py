"""SGLang's frontend language: `sgl.chunk(...)` in a program whose forks share documents.

Starts a server with a tiny random-weight model unless --url names a running one.
"""

import argparse

from sample import load_sample
from tiny_model import server_or_tiny

import sglang_lazy as sgl
from sglang_lazy.verify.prompts import INSTRUCTION, document_text


@sgl.function
def answer_all(s, documents, questions):
    s += INSTRUCTION
    for document in documents:
        s += sgl.chunk(document)
    forks = s.fork(len(questions))
    for fork, question in zip(forks, questions, strict=True):
        fork += f"Question: {question}\nAnswer:" + sgl.gen("answer", max_tokens=16, temperature=0)
    s["answers"] = [fork["answer"] for fork in forks]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url")
    args = parser.parse_args()

    request = load_sample()[0]
    documents = [document_text(doc) for doc in request["docs"]]
    questions = [request["question"], "Who is the performer of that song?"]
    with server_or_tiny(args.url) as url:
        sgl.set_default_backend(sgl.RuntimeEndpoint(url))
        for order in (documents, documents[::-1]):
            state = answer_all.run(documents=order, questions=questions)
            print(state["answers"])


if __name__ == "__main__":
    main()
