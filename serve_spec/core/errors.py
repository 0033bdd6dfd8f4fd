"""Errors a user can cause. Each names the field, the value and a fix."""

from functools import partial


class InvalidRequest(ValueError):
    """A request that cannot be served: HTTP 400 (413 if `too_long`)."""

    def __init__(self, field: str, value: object, fix: str, *, too_long: bool = False) -> None:
        super().__init__(f"{field}={value!r}: {fix}")
        self.field = field
        self.value = value
        self.fix = fix
        self.too_long = too_long

    def __reduce__(self) -> tuple[object, ...]:
        # The default passes `args` (the message alone) to __init__, which takes three arguments.
        rebuild = partial(InvalidRequest, too_long=self.too_long)
        return rebuild, (self.field, self.value, self.fix)


class TextTooLong(ValueError):
    """A text has more tokens than the model has room for: at least `at_least`."""

    def __init__(self, at_least: int) -> None:
        super().__init__(f"the text has at least {at_least} tokens")
        self.at_least = at_least


class EngineOverloaded(RuntimeError):
    """The engine holds as many unfinished requests as it may; try again later (HTTP 429)."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; names the file or tensor, and a fix."""


class PluginError(ValueError):
    """A plug-in that cannot be used; names its package, and a fix."""


class RequestFailed(RuntimeError):
    """A request that ends without an answer on every replica; others go on."""


class BrokenLogits(RequestFailed):
    """The target's logits hold NaN, or nothing finite: no token can be drawn."""

    def __init__(self) -> None:
        super().__init__(
            "target model produced NaN logits; check the checkpoint or use dtype=float32"
        )
