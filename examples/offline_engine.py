"""The offline engine: a prompt is a list of strings and chunks; a document keeps its KV from one prompt to the next.

Serves a tiny random-weight model unless --model-path names another.
"""

import argparse

from sample import load_sample
from tiny_model import tiny_model

from sglang_lazy import Engine, chunk
from sglang_lazy.testing import device_options
from sglang_lazy.verify.prompts import INSTRUCTION, document_text, question_text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path")
    args = parser.parse_args()

    engine = Engine(model_path=args.model_path or str(tiny_model()), log_level="error", **device_options())
    try:
        for request in load_sample()[-3:]:
            documents = [chunk(document_text(doc)) for doc in request["docs"]]
            result = engine.generate(
                segments=[INSTRUCTION, *documents, question_text(request)],
                sampling_params={"temperature": 0, "max_new_tokens": 16},
            )
            meta = result["meta_info"]
            print(f"{request['question']}\n  {result['text']!r}")
            print(f"  {meta['cached_tokens']} of {meta['prompt_tokens']} prompt tokens were there already")
            print(f"  documents reused: {sum(doc['hit'] for doc in meta['chunks'])} of {len(documents)}")
    finally:
        engine.shutdown()


if __name__ == "__main__":
    main()
