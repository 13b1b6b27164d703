"""docs/hooks.md has every hook, in the order in which they run."""

from pathlib import Path

from sglang_lazy.port import hooks, plugin
from tools import hook_page

ROOT = Path(__file__).parents[2]


def test_the_page_is_current():
    """Otherwise: python -m tools.hook_page > docs/hooks.md"""
    assert (ROOT / "docs" / "hooks.md").read_text(encoding="utf-8") == hook_page.page()


def test_each_target_has_one_place():
    """And no target is left in the order that no hook has any more."""
    targets = [target for targets in hook_page.STEPS.values() for target in targets]
    assert sorted(targets) == sorted({hook_page.short(hook) for hook in plugin.declared() if hook.role != "repair"})


called: list[str] = []


def target():
    called.append("target")


def test_hooks_of_one_target_are_listed_as_they_run():
    """As SGLang's registry calls them."""

    def before(name):
        return hooks.Hook(f"{__name__}.target", lambda: called.append(name), "BEFORE", "feature", "a test")

    def after(name):
        return hooks.Hook(f"{__name__}.target", lambda _result: called.append(name), "AFTER", "feature", "a test")

    def around(name):
        def function(original):
            called.append(name)
            original()

        return hooks.Hook(f"{__name__}.target", function, "AROUND", "feature", "a test")

    given = {"1": before("1"), "2": after("2"), "3": around("3"), "4": before("4"), "5": after("5")}
    hooks.apply(given.values())
    hooks.resolve(f"{__name__}.target")()
    called.remove("target")
    names = {hook: name for name, hook in given.items()}
    assert called == [names[hook] for hook in hook_page.in_order(given.values())]
