"""One root exception; every class is also the builtin a caller would expect to catch.

A message names the field or tensor, the value, what was allowed, and what to do. Each class takes
one string, so instances survive pickling between processes.
"""


class OpenK3Error(Exception):
    """Root of every error this project raises on purpose."""


class ConfigError(OpenK3Error, ValueError):
    """A recipe, flag or config.json holds an unknown key or a value that cannot work."""


class InputError(OpenK3Error, ValueError):
    """An argument of a public function has a wrong shape, dtype, range or type."""


class DataError(OpenK3Error, ValueError):
    """A corpus, token shard, image or tokenizer file is unusable."""


class CheckpointError(OpenK3Error, ValueError):
    """A checkpoint or model folder is incomplete, corrupt, or of another model."""


class BackendError(OpenK3Error, RuntimeError):
    """An explicitly requested backend cannot be honoured here."""


class StorageError(OpenK3Error, OSError):
    """Files could not be written (no space, no permission); nothing was left half-written."""


class DivergedError(OpenK3Error, ArithmeticError):
    """Training met too many bad steps in a row, or a model's outputs are not finite."""


class LostProcessError(OpenK3Error, RuntimeError):
    """Another process of a distributed run died, froze or failed, so this one cannot go on."""


class NotFoundError(OpenK3Error, LookupError):
    """No sandbox, file, command or session of that name exists."""


class ConflictError(OpenK3Error, RuntimeError):
    """The thing is in a state, or busy with an operation, that does not allow this one now."""


class LimitError(OpenK3Error, RuntimeError):
    """A quota of the caller or of the machine is used up; nothing was started."""


class DeniedError(OpenK3Error, PermissionError):
    """The caller or the user inside a sandbox has no right to do this."""


def nearest(name: str, allowed: "list[str] | tuple[str, ...] | set[str]") -> str:
    """A hint ` (did you mean 'x'?)` for messages about unknown names, or an empty string."""
    import difflib

    close = difflib.get_close_matches(name, sorted(allowed), n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""
