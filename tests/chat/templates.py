"""Chat templates that do what makes loss masks go wrong, in a few lines each."""

HEAD = "{{ '<|im_start|>' + message['role'] + '\\n' }}"
LOOP, DONE = "{% for message in messages %}", "{% endfor %}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
END = "{{ '<|im_end|>\\n' }}"

PLAIN = f"{LOOP}{HEAD}{{{{ message['content'] }}}}{END}{DONE}{PROMPT}"

# the reasoning of earlier turns is dropped, and the last turn always has some (Qwen3)
DROPS_REASONING = (
    LOOP + HEAD + "{% if message['role'] == 'assistant' %}{% set content = message['content'] %}"
    "{% set reasoning = message['reasoning_content'] or '' %}"
    "{% if '</think>' in content %}"
    "{% set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "{% if loop.last %}{{ '<think>\\n' + reasoning + '\\n</think>\\n\\n' }}{% endif %}{{ content }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '\\n<call>' + call['function']['name'] + ' ' }}"
    "{{ call['function']['arguments'] | tojson }}{{ '</call>' }}{% endfor %}"
    "{% else %}{{ message['content'] }}{% endif %}" + END + DONE + PROMPT
)

# space around contents is dropped, and a first message comes from nowhere (Llama)
TRIMS = (
    "{{ bos_token }}{{ '<|header|>system<|/header|>\\n\\nToday<|eot|>' }}"
    + LOOP
    + "{{ '<|header|>' + message['role'] + '<|/header|>\\n\\n' }}"
    "{{ message['content'] | trim }}{{ '<|eot|>' }}"
    + DONE
    + "{% if add_generation_prompt %}{{ '<|header|>assistant<|/header|>\\n\\n' }}{% endif %}"
)

# another end of turn for the last answer, and a channel for reasoning (GPT-OSS)
CHANNELS = (
    LOOP + "{% if message['role'] == 'assistant' %}"
    "{% if loop.last and message['thinking'] %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + message['thinking'] + '<|end|>' }}"
    "{% endif %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + message['content'] }}"
    "{{ '<|return|>' if loop.last else '<|end|>' }}"
    "{% else %}{{ '<|start|>' + message['role'] + '<|message|>' + message['content'] + '<|end|>' }}"
    "{% endif %}" + DONE + "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)

# the results of tools stand in the turn that called them, which goes on after them (Gemma 4)
ONE_TURN = (
    "{% for message in messages %}{% if message['role'] != 'tool' %}"
    "{% if not (loop.index0 and messages[loop.index0 - 1]['role'] == 'tool') %}"
    "{{ '<|turn>' + message['role'] + '\\n' }}{% endif %}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<|call>' + call['function']['name'] + '<call|>' }}{% endfor %}"
    "{% if message['tool_calls'] and not loop.last %}"
    "{{ '<|result>' + messages[loop.index0 + 1]['content'] + '<result|>' }}"
    "{% elif message['tool_calls'] %}{{ '<|result>' }}"
    "{% else %}{{ message['content'] | trim + '<turn|>\\n' }}{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn>assistant\\n' }}{% endif %}"
)

# no loop over the messages themselves
COUNTS = (
    "{% for i in range(messages | length) %}{{ '[' + messages[i]['role'] + '] ' }}"
    "{{ messages[i]['content'] + '</s>' }}{% endfor %}"
)

# a loop that goes on in the middle, and another one before it that writes nothing
GOES_ON = (
    "{% set ns = namespace(last=0) %}{% for message in messages %}{% set ns.last = loop.index0 %}"
    "{% endfor %}{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{ 'S:' + message['content'] + '\\n' }}{% continue %}{% endif %}"
    + HEAD
    + "{{ message['content'] }}"
    + END
    + "{% endfor %}"
)

# what is generated is marked, without the token that ends the turn
MARKED = (
    LOOP + HEAD + "{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}" + END + DONE + PROMPT
)

# the token that ends the turn is marked, too, and the end of its line
MARKED_TO_THE_LINE = (
    LOOP + HEAD + "{% if message['role'] == 'assistant' %}{% generation %}"
    "{{ message['content'] }}" + END + "{% endgeneration %}"
    "{% else %}{{ message['content'] }}" + END + "{% endif %}" + DONE + PROMPT
)

CAPITALS = PLAIN.replace("message['content'] }}", "message['content'] | upper }}")
BACKWARDS = PLAIN.replace("message['content'] }}", "message['content'][::-1] }}")
TWICE = PLAIN.replace(
    "{{ message['content'] }}", "{{ message['content'] }}{{ message['content'] }}"
)
FORGETS = (
    "{% for message in messages if message['role'] != 'assistant' %}"
    "{{ '<|im_start|>' + message['content'] + '<|im_end|>' }}{% endfor %}"
)
