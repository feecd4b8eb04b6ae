"""Which tokens end an assistant's turn, where a checkpoint's EOS does not say so."""

import tokenizers

# What known chat formats write after an assistant's text.
END_OF_TURN = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|end_of_turn|>",
    "<end_of_turn>",
    "<|eot|>",
    "<turn|>",
)


def find_end_of_turn_ids(backend: tokenizers.Tokenizer, chat_template: str | None) -> set[int]:
    """Returns the ids of end-of-turn tokens that the chat template itself writes.

    Checkpoints are found whose EOS is only the end of a document, so that a chat would never stop.
    Both must hold: the string is a special token of the vocabulary, and the template spells it. A
    base model that merely has the token is left as it is.
    """
    if chat_template is None:
        return set()
    special = {
        token.content: id
        for id, token in backend.get_added_tokens_decoder().items()
        if token.special
    }
    return {special[text] for text in END_OF_TURN if text in special and text in chat_template}
