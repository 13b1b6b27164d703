"""What a newer SGLang no longer has is found without starting it."""

import importlib
import sys
from collections import Counter
from types import SimpleNamespace

import pytest

from sglang_lazy.port import plugin
from sglang_lazy.port.hooks import Hook
from tools import hook_check


def target(self, batch, ignored=False, *, dry=False): ...


def before(scheduler, batch, *args, **kwargs): ...


def before_default(scheduler, message, dry=False, **kwargs): ...


def around(original, scheduler, batch, ignored=False, dry=False): ...


def after(result, scheduler, *_args, **_kwargs): ...


def needs_more(original, scheduler, batch, ignored, **kwargs): ...


def moved(scheduler, ignored, batch=None, **kwargs): ...


def takes_too_few(result, scheduler, batch, **kwargs): ...


def no_keywords(scheduler, batch, *args): ...


@pytest.mark.parametrize(
    "function, kind, reason",
    [
        (before, "BEFORE", ""),
        (around, "AROUND", ""),
        (after, "AFTER", ""),
        (before_default, "BEFORE", "multiple values for argument 'dry'"),
        (needs_more, "AROUND", "missing a required argument: 'ignored'"),
        (moved, "BEFORE", "`batch` is where `ignored` was, `ignored` is where `batch` was"),
        (takes_too_few, "AFTER", "too many positional arguments"),
        (no_keywords, "BEFORE", "got an unexpected keyword argument 'dry'"),
    ],
)
def test_calls_that_a_hook_cannot_take(function, kind, reason):
    hook = Hook(f"{__name__}.target", function, kind, "feature", "a test")
    assert reason in (found := hook_check.clash(target, hook))
    assert bool(found) == bool(reason)


def test_targets_and_imports_that_are_gone(tmp_path, monkeypatch):
    """Also those of imports inside functions; what stands in for them is imported and decorates."""
    source = """
        import sglang.srt.gone_module
        from sglang.srt.managers.scheduler import Scheduler, Gone
        class Ours(Gone): ...
        def later():
            from sglang.srt.gone.deep import decorate
            return decorate("with arguments")(later)
    """
    (tmp_path / "imports_gone.py").write_text("\n".join(line[8:] for line in source.splitlines()))
    monkeypatch.syspath_prepend(tmp_path)
    gone = dict(hook_check.gone_imports("imports_gone"))
    names = ["sglang.srt.gone_module", "sglang.srt.managers.scheduler.Gone", "sglang.srt.gone.deep.decorate"]
    assert gone == dict.fromkeys(names, "imports_gone")
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    for name in gone:
        hook_check.stand_in(name)
    module = importlib.import_module("imports_gone")
    assert module.later() is module.later
    lost = Hook("sglang.srt.managers.scheduler.Scheduler.gone_method", before, "BEFORE", "feature", "a test")
    assert hook_check.finding(lost).state == "gone"


def test_the_page_lists_what_to_mend_first():
    fine, changed, gone = (
        Hook(f"a.b.{state}", before, "BEFORE", "feature", "why") for state in ("fine", "changed", "gone")
    )
    found = [hook_check.Finding(hook, hook.target[4:], "reason") for hook in (fine, changed, gone)]
    text = hook_check.report({"sglang.x": "ours.y"}, [("ours.z", "error")], found)
    assert [line for line in text.splitlines() if line.startswith(("-", "1"))] == [
        "- `sglang.x` is gone; wanted by `ours.y`",
        "- `ours.z` cannot be imported: error",
        "1 gone, 1 changed, 1 fine.",
        f"- gone: `a.b.gone`: reason (`{__name__}.before`; why)",
        f"- changed: `a.b.changed`: reason (`{__name__}.before`; why)",
    ]


def test_all_hooks_are_checked_and_fine(monkeypatch, capsys):
    """Those that the plugin installs, and no others."""
    plugin.install()
    seen = []
    monkeypatch.setattr(hook_check, "finding", lambda hook: seen.append(hook) or hook_check.Finding(hook, "fine", ""))
    with pytest.raises(SystemExit) as end:
        hook_check.main()
    assert end.value.code == 0
    assert Counter(hook.key for hook in seen) == Counter(hook.key for hook in plugin._hooks)
    assert capsys.readouterr().out.count("All fine.") == 1


def test_any_sglang_is_taken_if_the_environment_says_so(monkeypatch):
    monkeypatch.delenv(plugin.ANY_SGLANG, raising=False)
    monkeypatch.setattr(plugin, "importlib", SimpleNamespace(metadata=SimpleNamespace(version=lambda _: "9.0")))
    with pytest.raises(RuntimeError, match=r"9\.0"):
        plugin.check_version()
    monkeypatch.setenv(plugin.ANY_SGLANG, "1")
    plugin.check_version()
