"""The examples' data for benchmarks: samples of retrieval questions, and a trained model."""

from pathlib import Path

from sglang_lazy.verify.prompts import read_json_lines

EXAMPLES = Path(__file__).parents[1] / "examples"
SAMPLE = EXAMPLES / "data" / "2wiki_sample.jsonl"
WORLDS = EXAMPLES / "data" / "worlds_sample.jsonl"
TRAINED = EXAMPLES / "models" / "tiny-rag"


def load_sample(path: Path = SAMPLE) -> list[dict]:
    """The requests of a sample: `docs`, each with `title` and `text`, `question` and `answers`."""
    return [request for _, request in read_json_lines(path)]
