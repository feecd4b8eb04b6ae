"""A chat template of the operator's in place of the model's own."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from jaxserve.errors import ConfigError, InvalidRequestError
from jaxserve.text.chat import ChatTemplate

if TYPE_CHECKING:  # it brings jax, which `import jaxserve.engine` must not
    from jaxserve.checkpoint.header import ModelHeader


def replace_template(header: "ModelHeader", path: Path | None) -> "ModelHeader":
    """Returns the model with the template of a file; as it is where there is none.

    Tokens that the template ends a turn with end the output as well.

    Raises:
      ConfigError: the file cannot be read, or is no valid template.
    """
    if path is None:
        return header
    try:
        source = path.read_text(encoding="utf-8")
        ChatTemplate(source)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"model.chat_template {path} cannot be read ({error}); name a file of UTF-8 text"
        ) from error
    except InvalidRequestError as error:
        raise ConfigError(f"model.chat_template {path} is no template: {error}") from error
    tokenizer = header.tokenizer.with_chat_template(source)
    ends = {id for id in tokenizer.eos_ids if id < header.config.vocab_size}
    return dataclasses.replace(header, tokenizer=tokenizer, eos_ids=header.eos_ids | ends)
