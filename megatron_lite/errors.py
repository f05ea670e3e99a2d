"""The errors a user can mend. Everything else that fails is a bug of ours and stays an assertion."""


class MegatronLiteError(Exception):
    """Something a user can fix; the message says what, with which numbers, and what to change."""


class ConfigError(MegatronLiteError):
    """The recipe, or how it was launched, cannot be run."""


class DataError(MegatronLiteError):
    """A corpus, a tokenizer or a document cannot be used."""


class CheckpointError(MegatronLiteError):
    """A checkpoint is missing, incomplete, damaged, or does not fit this run."""


class TrainingError(MegatronLiteError):
    """Training went wrong in a way that going on would not mend."""


def require(ok: bool, message: str, error: type[MegatronLiteError] = ConfigError) -> None:
    """Raise `error(message)` unless `ok`."""
    if not ok:
        raise error(message)
