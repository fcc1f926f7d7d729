// One answer of a GGUF file in an app for iOS or Android, with llama.cpp as a library. templates/app.md says how it is built.
// Written for llama.cpp as in llama-cpp-python 0.3.36 (common/chat.h, include/llama.h; type-checked against it 2026-11-26).
//
// The prompt comes from the file's own chat template through common/chat.h, which renders Jinja. llama_chat_apply_template of
// llama.h does not: it knows a list of templates, and takes one of them for yours.
#include "chat.h"
#include "common.h"
#include "llama.h"

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

using Say = std::function<void(const std::string &)>;

// Loads once: llama_model_load_from_file(path, llama_model_default_params()); keep the model as long as the app answers.
std::string answer(llama_model * model, const std::vector<common_chat_msg> & messages, int most, const Say & say) {
    const llama_vocab * vocab = llama_model_get_vocab(model);
    auto templates = common_chat_templates_init(model, "");
    if (!common_chat_templates_was_explicit(templates.get())) {
        throw std::runtime_error("the file has no chat template: llama.cpp would take ChatML");
    }
    common_chat_templates_inputs inputs;
    inputs.messages = messages;
    const std::string prompt = common_chat_templates_apply(templates.get(), inputs).prompt;
    // It cuts the BOS that the tokenizer adds, so the tokenizer must add it here.
    std::vector<llama_token> tokens = common_tokenize(vocab, prompt, /*add_special=*/true, /*parse_special=*/true);

    llama_context_params parameters = llama_context_default_params();
    parameters.n_ctx = parameters.n_batch = tokens.size() + most;  // a phone: as short as the conversation
    llama_context * context = llama_init_from_model(model, parameters);
    if (context == nullptr) {
        throw std::runtime_error("not enough memory for a context of this length");
    }
    // Greedy, without a penalty. For sampling add the values of generation_config.json in this order:
    // llama_sampler_init_temp, _top_k, _top_p, _min_p, _dist.
    llama_sampler * sampler = llama_sampler_chain_init(llama_sampler_chain_default_params());
    llama_sampler_chain_add(sampler, llama_sampler_init_greedy());

    std::string text;
    llama_batch batch = llama_batch_get_one(tokens.data(), tokens.size());
    for (int made = 0; made < most && llama_decode(context, batch) == 0; made++) {
        llama_token token = llama_sampler_sample(sampler, context, -1);
        if (llama_vocab_is_eog(vocab, token)) {
            break;
        }
        const std::string piece = common_token_to_piece(vocab, token, /*special=*/false);
        text += piece;  // a character may need several pieces: show what is whole UTF-8
        say(piece);
        tokens = { token };
        batch = llama_batch_get_one(tokens.data(), 1);
    }
    llama_sampler_free(sampler);
    llama_free(context);
    return text;
}
