"""Policies of other packages: `speculative_adaptive_strategy: MODULE:CLASS`."""

from __future__ import annotations

from serve_spec.adaptive.policy import PolicyContext, StepPolicy
from serve_spec.config import ConfigError
from serve_spec.config.plugins import load_plugin
from serve_spec.core.draft import DraftShape
from serve_spec.core.registry import one_line

_FIELD = "speculative_adaptive_strategy"


def load_policy(name: str) -> type[StepPolicy]:
    """Import the class that `MODULE:CLASS` names.

    Raises ConfigError, one line: it does not import, does not exist, or is no `StepPolicy`.
    """
    found = load_plugin(_FIELD, name)
    module_name, _, class_name = name.partition(":")
    package = module_name.partition(".")[0]
    if not isinstance(found, type) or not issubclass(found, StepPolicy):
        what = f"{class_name} is not a subclass of serve_spec.adaptive.StepPolicy"
        raise _refusal(name, what, f"derive it in {package}")
    if missing := sorted(found.__abstractmethods__):
        raise _refusal(name, f"{class_name} lacks {', '.join(missing)}", f"add it to {package}")
    return found


def build_policy(name: str, context: PolicyContext) -> StepPolicy:
    """Return the policy that `MODULE:CLASS` names.

    Raises ConfigError, one line: as `load_policy`, its constructor fails, or its shapes are not of
    the context.
    """
    create = load_policy(name)
    package = name.partition(":")[0].partition(".")[0]
    try:
        policy = create(context)  # type: ignore[call-arg]  # its constructor takes the context
        wrong = [shape for shape in policy.shapes if not _is_allowed(shape, context)]
    except Exception as error:  # it runs the package's code
        what = f"{create.__name__} cannot be built ({one_line(error)})"
        raise _refusal(name, what, f"repair {package}") from error
    if wrong or not policy.shapes:
        what = f"shapes={list(map(str, policy.shapes))}"
        trees = f", or trees of {[*map(str, context.trees)]}" if context.trees else ""
        fix = f"let {package} give chains of at most {context.max_steps} steps{trees}"
        raise _refusal(name, what, fix)
    return policy


def _is_allowed(shape: DraftShape, context: PolicyContext) -> bool:
    return shape.depth <= context.max_steps if shape.is_chain else shape in context.trees


def _refusal(name: str, what: str, fix: str) -> ConfigError:
    return ConfigError(f"{_FIELD}={name!r}: {what}; {fix}")
