"""What can go wrong, by what the caller can do about it."""

from __future__ import annotations


class SkepError(Exception):
    """Anything that Skep has to say; `hint` is what to do about it."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class Unreachable(SkepError):
    """The hive did not answer for as long as the client was willing to wait."""


class Refused(SkepError):
    """The hive said no. `code` is one of the codes in docs/wire.md; `status` is HTTP's."""

    def __init__(self, code: str, status: int, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.code = code
        self.status = status


class KeyRefused(Refused):
    """The key is missing, unknown, expired, or not for this."""


class Mismatch(SkepError):
    """The model or dataset here is not the one the run was created with."""


class NotFinite(SkepError):
    """A loss or gradient is NaN or infinite. The batch was given back, nothing was sent."""


class Misuse(SkepError):
    """The library was called in a way that cannot work."""


class RunFailed(SkepError):
    """The run cannot go on; the message says why."""


class Terminated(SystemExit):
    """SIGTERM came. What was finished has been pushed, what was not has been given back.

    As a `SystemExit` it ends the script with code 143, so that whatever started it knows that
    there is work left.
    """

    def __init__(self) -> None:
        super().__init__(143)
