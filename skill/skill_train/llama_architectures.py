"""The architectures that llama.cpp's converter knows, so that `plan` can tell without fetching the converter.

Source: TEXT_MODEL_MAP in conversion/__init__.py of llama.cpp, as it lies in the source distribution of llama-cpp-python
0.3.36, read on 2026-11-21. A test compares this list with the converter in the cache.
"""

from __future__ import annotations

VERSION = "0.3.36"  # of llama-cpp-python


def is_known(architecture: str) -> bool:
    """Whether the converter has a class for this entry of `architectures` in a `config.json`."""
    return architecture in NAMES


def why_not(architecture: str) -> str:
    return f"{architecture} is not registered in llama.cpp at llama-cpp-python {VERSION}"


NAMES = frozenset(
    """
    AfmoeForCausalLM ApertusForCausalLM ArceeForCausalLM ArcticForCausalLM AudioFlamingo3ForConditionalGeneration
    BaiChuanForCausalLM BaichuanForCausalLM BailingMoeForCausalLM BailingMoeV2ForCausalLM BailingMoeV3ForCausalLM
    BailingMoeV3VLForConditionalGeneration BambaForCausalLM BertForMaskedLM BertForSequenceClassification BertModel
    BitNetForCausalLM BitnetForCausalLM BloomForCausalLM BloomModel CamembertModel ChameleonForCausalLM
    ChameleonForConditionalGeneration ChatGLMForConditionalGeneration ChatGLMModel CodeShellForCausalLM
    CogVLMForCausalLM Cohere2ForCausalLM Cohere2MoeForCausalLM CohereForCausalLM DFlash2DraftModel DFlashDraftModel
    DSparkDraftModel DSparkSpeculator DbrxForCausalLM DeciLMForCausalLM DeepseekForCausalLM DeepseekOCRForCausalLM
    DeepseekV2ForCausalLM DeepseekV32ForCausalLM DeepseekV3ForCausalLM DeepseekV4DSparkModel DeepseekV4ForCausalLM
    DistilBertForMaskedLM DistilBertForSequenceClassification DistilBertModel Dots1ForCausalLM Dots3NoteForCausalLM
    Dots3NoteForConditionalGeneration Dots3NoteTextForCausalLM DotsOCRForCausalLM DreamModel Eagle3DraftModel
    Eagle3LlamaForCausalLM Eagle3Speculator Ernie4_5ForCausalLM Ernie4_5_ForCausalLM Ernie4_5_MoeForCausalLM
    EuroBertModel Exaone4ForCausalLM Exaone4_5_ForConditionalGeneration ExaoneForCausalLM ExaoneMoEForCausalLM
    ExaoneMoeForCausalLM FalconForCausalLM FalconH1ForCausalLM FalconMambaForCausalLM GPT2LMHeadModel
    GPTBigCodeForCausalLM GPTNeoXForCausalLM GPTRefactForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM
    Gemma3ForConditionalGeneration Gemma3TextModel Gemma3nForCausalLM Gemma3nForConditionalGeneration
    Gemma4AssistantForCausalLM Gemma4DSparkModel Gemma4ForCausalLM Gemma4ForConditionalGeneration
    Gemma4UnifiedAssistantForCausalLM Gemma4UnifiedForConditionalGeneration GemmaForCausalLM Glm4ForCausalLM
    Glm4MoeForCausalLM Glm4MoeLiteForCausalLM Glm4vForConditionalGeneration Glm4vMoeForConditionalGeneration
    Glm5NextForConditionalGeneration GlmForCausalLM GlmMoeDsaForCausalLM GlmOcrForConditionalGeneration
    GptOssForCausalLM GraniteForCausalLM GraniteMoeForCausalLM GraniteMoeHybridForCausalLM GraniteMoeSWAForCausalLM
    GraniteMoeSharedForCausalLM GraniteSWAForCausalLM GraniteSpeechForConditionalGeneration
    GraniteSpeechPlusForConditionalGeneration GraniteSwitchForCausalLM Grok1ForCausalLM GrokForCausalLM
    GroveMoeForCausalLM HYV3ForCausalLM HYV4ForCausalLM HrmTextForCausalLM HunYuanDenseV1ForCausalLM
    HunYuanMoEV1ForCausalLM HunYuanVLForConditionalGeneration IQuestCoderForCausalLM InternLM2ForCausalLM
    InternLM3ForCausalLM JAISLMHeadModel Jais2ForCausalLM JambaForCausalLM JanusForConditionalGeneration
    JinaBertForMaskedLM JinaBertModel JinaEmbeddingsV5Model KORMoForCausalLM KimiK25ForConditionalGeneration
    KimiK3ForConditionalGeneration KimiLinearForCausalLM KimiLinearModel KimiVLForConditionalGeneration
    LFM2ForCausalLM LLaDAMoEModel LLaDAMoEModelLM LLaDAModelLM LLaMAForCausalLM LagunaForCausalLM
    Lfm25AudioTokenizer Lfm2BidirectionalModel Lfm2DSparkDraftModel Lfm2ForCausalLM Lfm2Model Lfm2MoeForCausalLM
    LingDSparkModel Llama4ForCausalLM Llama4ForConditionalGeneration LlamaBidirectionalModel LlamaForCausalLM
    LlamaForCausalLMEagle3 LlamaModel LlavaForConditionalGeneration LlavaStableLMEpochForCausalLM MPTForCausalLM
    MT5ForConditionalGeneration MaincoderForCausalLM Mamba2ForCausalLM MambaForCausalLM MambaLMHeadModel
    MapleForCausalLM MellumForCausalLM MiMoV2FlashForCausalLM MiMoV2ForCausalLM MiniCPM3ForCausalLM
    MiniCPMForCausalLM MiniCPMV4_6ForConditionalGeneration MiniMaxM1ForCausalLM MiniMaxM2ForCausalLM
    MiniMaxM3SparseForCausalLM MiniMaxM3SparseForConditionalGeneration MiniMaxText01ForCausalLM
    Ministral3ForCausalLM Mistral3ForConditionalGeneration MistralForCausalLM MixtralForCausalLM
    ModernBertForMaskedLM ModernBertForSequenceClassification ModernBertModel MuseGlimmerAssistantModel
    MuseGlimmerForConditionalGeneration NanbeigeForCausalLM NemotronForCausalLM NemotronHForCausalLM
    NemotronHPuzzleForCausalLM NeoBERT NeoBERTForSequenceClassification NeoBERTLMHead NomicBertModel OLMoForCausalLM
    Olmo2ForCausalLM Olmo3ForCausalLM OlmoForCausalLM OlmoeForCausalLM OpenELMForCausalLM OrionForCausalLM
    PLMForCausalLM PLaMo2ForCausalLM PLaMo3ForCausalLM PaddleOCRVLForConditionalGeneration PanguEmbeddedForCausalLM
    Phi3ForCausalLM Phi4ForCausalLMV PhiForCausalLM PhiMoEForCausalLM Plamo2ForCausalLM Plamo3ForCausalLM
    PlamoForCausalLM PocketTTSModel QWenLMHeadModel Qwen2AudioForConditionalGeneration Qwen2ForCausalLM Qwen2Model
    Qwen2MoeForCausalLM Qwen2VLForConditionalGeneration Qwen2VLModel Qwen2_5OmniModel
    Qwen2_5_VLForConditionalGeneration Qwen3ASRForConditionalGeneration Qwen3DSparkModel Qwen3ForCausalLM Qwen3Model
    Qwen3MoeForCausalLM Qwen3NextForCausalLM Qwen3OmniMoeForConditionalGeneration Qwen3TTSForConditionalGeneration
    Qwen3VLForConditionalGeneration Qwen3VLMoeForConditionalGeneration Qwen3_5ForCausalLM
    Qwen3_5ForConditionalGeneration Qwen3_5MoeForCausalLM Qwen3_5MoeForConditionalGeneration Qwen4ExpForCausalLM
    Qwen4ExpForConditionalGeneration RND1 RWForCausalLM RWKV6Qwen2ForCausalLM RWKV7ForCausalLM
    RobertaForSequenceClassification RobertaModel RuGPT3XLForCausalLM Rwkv6ForCausalLM Rwkv7ForCausalLM
    RwkvHybridForCausalLM Sarashina2VisionForCausalLM SarvamMoEForCausalLM SeedOssForCausalLM
    SmallThinkerForCausalLM SmolLM3ForCausalLM SolarOpenForCausalLM Spark2_5ForCausalLM StableLMEpochForCausalLM
    StableLmForCausalLM Starcoder2ForCausalLM Step3p5ForCausalLM Step3p7ForConditionalGeneration
    StepVLForConditionalGeneration T5EncoderModel T5ForConditionalGeneration T5WithLMHeadModel TalkieForCausalLM
    UMT5ForConditionalGeneration UMT5Model UltravoxModel UnlimitedOCRForCausalLM VLlama3ForCausalLM
    VoxtralForConditionalGeneration WavTokenizerDec XLMRobertaForSequenceClassification XLMRobertaModel
    XverseForCausalLM YoutuForCausalLM YoutuVLForConditionalGeneration modeling_grove_moe.GroveMoeForCausalLM
    modeling_sarvam_moe.SarvamMoEForCausalLM
    """.split()
)
