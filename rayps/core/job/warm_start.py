"""From which file a job takes its first parameters: the option `start_from`. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

from rayps_client.errors import ConfigError
from rayps_client.values import Json

FIELD = "start_from"
_KEYS = {"path": str, "strict": bool, "remove_prefix": str, "add_prefix": str}
_EXAMPLE = '"base.safetensors", or {"path": "base", "strict": False, "remove_prefix": "model."}'


@dataclass(frozen=True, slots=True)
class StartFrom:
    """The option `start_from`: a path, and how the names of the file's tensors become names of the model.

    `remove_prefix` is removed from the names in the file that begin with it, and then `add_prefix` is added to every
    name. With `strict`, the file and the model must have the same names and shapes. Without it, each tensor whose name
    and shape fit is used, and the rest of the model is drawn from the seed.
    """

    path: str
    strict: bool = True
    remove_prefix: str = ""
    add_prefix: str = ""

    @classmethod
    def parse(cls, given: Json) -> StartFrom:
        """Return the option that `given` describes: a path, or a dict with `path` and the other fields.

        Raises ConfigError if `given` is neither.
        """
        found: Json = {"path": given} if isinstance(given, str) else given
        if not isinstance(found, dict) or not found.get("path"):
            raise ConfigError(f"{FIELD} is {given!r}: give {_EXAMPLE}", field=FIELD)
        for key, value in found.items():
            if key not in _KEYS:
                raise ConfigError(f"{FIELD} has no field {key!r}: the fields are {', '.join(_KEYS)}", field=FIELD)
            if not isinstance(value, _KEYS[key]):
                raise ConfigError(f"{FIELD} has {key}={value!r}: give {_EXAMPLE}", field=FIELD)
        return cls(**found)

    def name_in_model(self, name: str) -> str:
        """Return the model's name for the tensor that the file calls `name`."""
        return self.add_prefix + name.removeprefix(self.remove_prefix)
