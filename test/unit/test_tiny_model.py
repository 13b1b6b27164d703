"""The folder of the tiny model, which several processes may want at once."""

from sglang_lazy.testing import tiny_model


def test_the_first_of_two_that_build_it_at_once_wins(tmp_path, monkeypatch):
    begun = []

    def build(folder, texts):
        begun.append(folder)
        number = len(begun)
        if number == 1:
            tiny_model.tiny_model(texts)  # another process begins later and is done earlier
        folder.mkdir()
        (folder / "builder").write_text(str(number))

    monkeypatch.setattr(tiny_model, "CACHE", tmp_path)
    monkeypatch.setattr(tiny_model, "_build", build)
    folder = tiny_model.tiny_model(["text"])
    assert (folder / "builder").read_text() == "2" and list(tmp_path.iterdir()) == [folder]
