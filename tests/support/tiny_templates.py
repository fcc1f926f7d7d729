"""Short chat templates with the behaviour of the real ones; each is written here, none is a vendor's text."""

# ChatML. A conversation without a system message gets one, as Qwen2.5 does.
QWEN2 = (
    "{%- if messages[0]['role'] != 'system' -%}"
    "{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}"
    "{%- endif -%}"
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)

# ChatML with thinking: the assistant's turns before the last question lose their thoughts, a turn after it shows a
# think block even when it has none, and `enable_thinking=False` opens the answer after an empty block.
QWEN3 = (
    "{%- set last = namespace(question=-1) -%}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'user' -%}{%- set last.question = loop.index0 -%}{%- endif -%}"
    "{%- endfor -%}"
    "{%- for message in messages -%}"
    "{%- set content = message['content'] -%}"
    "{%- if message['role'] == 'assistant' -%}"
    "{%- set thought = '' -%}"
    "{%- if '</think>' in content -%}"
    "{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}"
    "{%- endif -%}"
    "{%- if loop.index0 > last.question -%}"
    "{%- set content = '<think>\\n' + thought + '\\n</think>\\n\\n' + content -%}"
    "{%- endif -%}"
    "{%- endif -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + content + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}"
    "{{- '<|im_start|>assistant\\n' -}}"
    "{%- if enable_thinking is defined and enable_thinking is false -%}"
    "{{- '<think>\\n\\n</think>\\n\\n' -}}"
    "{%- endif -%}"
    "{%- endif -%}"
)

# ChatML that opens a thought when it asks for an answer, and writes none before an answer of a row: as the templates of
# DeepSeek-R1's distilled models and of QwQ do.
OPENS_A_THOUGHT = QWEN2.replace("'<|im_start|>assistant\\n'", "'<|im_start|>assistant\\n<think>\\n'")

# ChatML with the system message in the last message, if that is a question: as Mistral 7B v0.3 has it. It is in no row
# that ends with an answer.
SYSTEM_AT_THE_END = (
    "{%- set system = messages[0]['content'] + '\\n\\n' if messages[0]['role'] == 'system' else '' -%}"
    "{%- for message in messages if message['role'] != 'system' -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' -}}"
    "{{- (system if loop.last and message['role'] == 'user' else '') + message['content'] + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)

# ChatML of questions and answers alone, as the first template of Phi-3 Mini.
WITHOUT_SYSTEM = SYSTEM_AT_THE_END.replace("(system if loop.last and message['role'] == 'user' else '') + ", "")

# Headers around the role; the contents are trimmed.
LLAMA_3 = (
    "{{- bos_token -}}"
    "{%- for message in messages -%}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' -}}"
    "{{- message['content'] | trim + '<|eot_id|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}"
)

# The system message moves into the first question; roles must alternate.
_INST = (
    "{%- if messages[0]['role'] == 'system' -%}"
    "{%- set system = 'SYSTEM' -%}{%- set turns = messages[1:] -%}"
    "{%- else -%}{%- set system = '' -%}{%- set turns = messages -%}{%- endif -%}"
    "{%- for message in turns -%}"
    "{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{- raise_exception('Conversation roles must alternate user/assistant') -}}"
    "{%- endif -%}"
    "{%- if message['role'] == 'user' -%}"
    "{{- (START) + '[INST] ' + (system if loop.first else '') + message['content'] + ' [/INST]' -}}"
    "{%- else -%}{{- ' ' + message['content'] + 'CLOSE' + eos_token -}}{%- endif -%}"
    "{%- endfor -%}"
)


def _inst(*, system: str, close: str, start: str) -> str:
    return _INST.replace("'SYSTEM'", system).replace("CLOSE", close).replace("START", start)


LLAMA_2 = _inst(system="'<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n'", close=" ", start="bos_token")
MISTRAL = _inst(system="messages[0]['content'] + '\\n\\n'", close="", start="bos_token if loop.first else ''")

# The assistant is called "model", and a system message is put before the first question.
GEMMA = (
    "{{- bos_token -}}"
    "{%- if messages[0]['role'] == 'system' -%}"
    "{%- set system = messages[0]['content'] + '\\n\\n' -%}{%- set turns = messages[1:] -%}"
    "{%- else -%}{%- set system = '' -%}{%- set turns = messages -%}{%- endif -%}"
    "{%- for message in turns -%}"
    "{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}"
    "{{- '<start_of_turn>' + role + '\\n' + (system if loop.first else '') + message['content'] | trim -}}"
    "{{- '<end_of_turn>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}"
)

GEMMA_4 = GEMMA.replace("<start_of_turn>", "<|turn>").replace("<end_of_turn>", "<turn|>")

# A mark for each role and one for the end of a turn.
PHI_3 = (
    "{%- for message in messages -%}"
    "{{- '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' -}}"
    "{%- endfor -%}"
    "{{- '<|assistant|>\\n' if add_generation_prompt else eos_token -}}"
)

# --- Pictures: a message is text, or a list of parts ---

_PARTS = (
    "{%- macro parts(content) -%}"
    "{%- if content is string -%}{{- content -}}"
    "{%- else -%}"
    "{%- for part in content -%}"
    "{%- if part.type == 'image' -%}{{- 'PICTURE' -}}{%- elif 'text' in part -%}{{- part.text -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- endif -%}"
    "{%- endmacro -%}"
)

# ChatML with a picture between two marks, as Qwen2-VL, Qwen2.5-VL and Qwen3-VL have it.
QWEN_VL = _PARTS.replace("PICTURE", "<|vision_start|><|image_pad|><|vision_end|>") + (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + parts(message['content']) + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)

# Gemma 3: the mark of a picture's start stands for the whole picture.
GEMMA_PICTURES = _PARTS.replace("PICTURE", "<start_of_image>") + (
    "{{- bos_token -}}"
    "{%- if messages[0]['role'] == 'system' -%}"
    "{%- set system = parts(messages[0]['content']) + '\\n\\n' -%}{%- set turns = messages[1:] -%}"
    "{%- else -%}{%- set system = '' -%}{%- set turns = messages -%}{%- endif -%}"
    "{%- for message in turns -%}"
    "{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}"
    "{{- '<start_of_turn>' + role + '\\n' + (system if loop.first else '') + parts(message['content']) | trim -}}"
    "{{- '<end_of_turn>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}"
)

# SmolVLM: no space between the role and a picture, one between the role and text.
SMOLVLM = _PARTS.replace("PICTURE", "<image>") + (
    "<|im_start|>"
    "{%- for message in messages -%}"
    "{%- set picture = message['content'] is not string and message['content'][0]['type'] == 'image' -%}"
    "{{- message['role'] | capitalize + (':' if picture else ': ') + parts(message['content']) -}}"
    "{{- '<end_of_utterance>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- 'Assistant:' -}}{%- endif -%}"
)

# Mistral 3: questions between two marks, with the mark of a picture where it stands.
MISTRAL_PICTURES = _PARTS.replace("PICTURE", "[IMG]") + (
    "{{- bos_token -}}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'user' -%}{{- '[INST]' + parts(message['content']) + '[/INST]' -}}"
    "{%- elif message['role'] == 'assistant' -%}{{- parts(message['content']) + eos_token -}}"
    "{%- else -%}{{- '[SYSTEM_PROMPT]' + parts(message['content']) + '[/SYSTEM_PROMPT]' -}}{%- endif -%}"
    "{%- endfor -%}"
)

# --- Calls of tools ---

_CALLS = (
    "{%- macro calls(message) -%}"
    "{%- for call in message.tool_calls or [] -%}"
    "{{- ('\\n' if message.content or not loop.first else '') + '<tool_call>\\n{\"name\": \"' + call.function.name -}}"
    "{{- '\", \"arguments\": ' + call.function.arguments | tojson + '}\\n</tool_call>' -}}"
    "{%- endfor -%}"
    "{%- endmacro -%}"
)
_RESPONSE = "{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' -}}"

# Qwen2.5: text and calls in one turn, one after the other.
QWEN2_CALLS = (
    _CALLS + "{%- for message in messages -%}"
    "{%- if message.role == 'tool' -%}" + _RESPONSE + "{%- else -%}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + calls(message) + '<|im_end|>\\n' -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)

# Qwen3: the same, and a think block in the last message alone: what a turn looks like depends on what follows it.
QWEN3_CALLS = QWEN2_CALLS.replace(
    "'\\n' + message.content",
    "'\\n' + ('<think>\\n\\n</think>\\n\\n' if loop.last and message.role == 'assistant' else '') + message.content",
)

# Llama 3.2: one call a turn, and its text is left out.
LLAMA_3_CALLS = (
    "{{- bos_token -}}"
    "{%- for message in messages -%}"
    "{%- if message.tool_calls -%}"
    "{%- if message.tool_calls | length != 1 -%}{{- raise_exception('one call at once') -}}{%- endif -%}"
    "{%- set call = message.tool_calls[0].function -%}"
    "{%- set text = '{\"name\": \"' + call.name + '\", \"parameters\": ' + call.arguments | tojson + '}' -%}"
    "{%- else -%}{%- set text = message.content | trim -%}{%- endif -%}"
    "{%- set role = 'ipython' if message.role == 'tool' else message.role -%}"
    "{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' + text + '<|eot_id|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}"
)

# Gemma 4: the answer of the tool stands in the assistant's turn, between its call and its text.
GEMMA_4_CALLS = (
    "{%- for message in messages if message.role != 'tool' -%}"
    "{{- '<|im_start|>' + message.role + '\\n' -}}"
    "{%- if message.tool_calls -%}"
    "{{- '<call>' + message.tool_calls[0].function.name + '</call>' -}}"
    "{%- for other in messages if other.role == 'tool' -%}"
    "{{- '<answer>' + other.content + '</answer>' -}}"
    "{%- endfor -%}"
    "{%- endif -%}"
    "{{- message.content + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
