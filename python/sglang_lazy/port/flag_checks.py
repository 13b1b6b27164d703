"""Before SGLang starts: flags from a configuration file, and checks that do not need the model's weights."""

import argparse
import copy
from collections.abc import Sequence

import torch
from sglang.srt.arg_groups.overrides import model_config_of
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

from sgl_kernel_lazy.cuda import jit
from sglang_lazy.core.config import LazyConfig
from sglang_lazy.core.policy import refusal
from sglang_lazy.core.supported import Unfit
from sglang_lazy.policies import get_policy
from sglang_lazy.port import cpu
from sglang_lazy.port.cache.storage import extra_config
from sglang_lazy.port.facts import flags_of
from sglang_lazy.port.model.compat import known_traits, unfit_config, unfit_draft, unfit_flags, unfit_together
from sglang_lazy.port.model.recurrent import unfit_states
from sglang_lazy.serving.keys import check_keys
from sglang_lazy.serving.trained_tokens import tokens_for


def merge_config_file(parser: argparse.ArgumentParser, argv: Sequence[str]) -> list[str]:
    """`argv` and the flags of `parser` that are set in the file named by --config."""
    return ConfigArgumentMerger(parser).merge_config_with_args(list(argv))


def check_start(config: LazyConfig, args: ServerArgs, in_process: bool = False) -> None:
    """Raise Unfit if SGLang's flags, the model's configuration or this machine do not allow chunk reuse, unless
    `config` has the fallback.

    in_process: whether requests are tokenized in this process, as an engine's are.
    Raises ValueError, in any case, for flags under which SGLang could not serve, or no prompt that names no policy.
    """
    if in_process and args.tokenizer_worker_num > 1:
        raise ValueError("an engine tokenizes in this process: tokenizer_worker_num must be 1")
    if config.shadow_rate:
        config.check_shadow(args.enable_metrics, args.tokenizer_worker_num)
    if args.device == "cpu" and args.grammar_backend == "xgrammar":
        raise ValueError(
            "--grammar-backend xgrammar masks tokens on a GPU: on a CPU, leave it out or use llguidance or outlines"
        )
    args.resolve_once()
    copy.deepcopy(args).check_server_args()  # as SGLang will: it parses the adapters' paths then, but only once
    flags = flags_of(args)
    if flags.speculative_algorithm is not None and not cpu.has_draft_kernels(flags.device):
        raise ValueError("--speculative-algorithm: SGLang has its kernels for GPUs alone, so leave it out on a CPU")
    if flags.radix_cache_backend is None:
        raise ValueError("server_args: SGLang has resolved them before sglang-lazy was active; pass them unresolved")
    if config.keys:
        check_keys(config.keys, flags.api_key, flags.admin_api_key, flags.tokenizer_worker_num)
    if reason := _unfit_default(config, args):
        raise ValueError(reason)
    if config.fallback:
        return
    model_config = model_config_of(args)
    model = unfit_states(args, model_config) + unfit_config(model_config, untested=config.untested_model)
    model += unfit_together(args, model_config) + unfit_draft(args, model_config)
    if refused := refusal(get_policy(config.default_link), known_traits(model_config)):
        model.append(f"--lazy-default-link {config.default_link}: {refused}")
    kernels = jit.missing(torch.device(flags.device)) if config.kernels == "cuda" else None
    if reasons := unfit_flags(args) + model + ([f"--lazy-kernels cuda: {kernels}"] if kernels else []):
        raise Unfit(reasons)
    if flags.hicache_storage_backend is not None:
        extra_config(flags)


def _unfit_default(config: LazyConfig, args: ServerArgs) -> str | None:
    """Why the default policy could serve no prompt, as far as that is known before the model is loaded, or None."""
    policy, name = get_policy(config.default_link), f"--lazy-default-link {config.default_link}"
    if policy.preamble == "neutral" and not config.preamble:
        return f"{name}: it computes chunks after --lazy-preamble, which is empty"
    if policy.preamble == "neutral" and args.skip_tokenizer_init:
        return f"{name}: without a tokenizer (--skip-tokenizer-init) there is no --lazy-preamble"
    if policy.trained:
        try:
            tokens_for(policy, args.model_path, model_config_of(args).vocab_size)
        except ValueError as error:
            return f"{name}: {error}"
    return None
