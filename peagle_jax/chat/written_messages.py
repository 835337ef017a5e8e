"""The message that a target has written, from the text of its tokens."""

import re
from typing import Any

# GPT-OSS's channels: <|channel|>analysis<|message|>..<|end|><|start|>assistant<|channel|>final..
CHANNEL = re.compile(
    r"<\|channel\|>(\w+)[^<]*<\|message\|>(.*?)(?=<\|end\|>|<\|return\|>|<\|call\|>|$)", re.DOTALL
)


def message_of(text: str) -> dict[str, Any] | None:
    """The assistant's message that a target has written, without its stop token.

    Reasoning between tags stays in the content, where templates look for it; of GPT-OSS's channels
    all but `final` are the reasoning, because its template refuses them in a content. Without a
    final channel it called a tool, or said nothing to the user: None.
    """
    if "<|channel|>" not in text:
        return {"role": "assistant", "content": text}
    channels = CHANNEL.findall(text)
    by_name = dict(channels)
    if "final" not in by_name:
        return None
    message = {"role": "assistant", "content": by_name["final"]}
    thoughts = "\n".join(thought for name, thought in channels if name != "final")
    return message | ({"thinking": thoughts} if thoughts else {})
