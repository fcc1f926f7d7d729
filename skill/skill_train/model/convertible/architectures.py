"""The architectures that llama.cpp's converter knows, so that `plan` does not need the converter.

Source: TEXT_MODEL_MAP and MMPROJ_MODEL_MAP in conversion/__init__.py of llama.cpp, as they lie in the source
distribution of llama-cpp-python 0.3.36, read on 2026-11-21. A test compares them with the converter in the cache.
"""

VERSION = "0.3.36"  # of llama-cpp-python


def _names(by_ending: dict[str, str]) -> frozenset[str]:
    """The whole names: each word with the ending under which it is listed."""
    return frozenset(word + ending for ending, words in by_ending.items() for word in words.split())


NAMES = _names(
    {
        "ForCausalLM": """
            Afmoe Apertus Arcee Arctic BaiChuan Baichuan BailingMoe BailingMoeV2 BailingMoeV3 Bamba BitNet Bitnet Bloom
            Chameleon CodeShell CogVLM Cohere Cohere2 Cohere2Moe Dbrx DeciLM Deepseek DeepseekOCR DeepseekV2 DeepseekV3
            DeepseekV32 DeepseekV4 Dots1 Dots3Note Dots3NoteText DotsOCR Eagle3Llama Ernie4_5 Ernie4_5_ Ernie4_5_Moe
            Exaone Exaone4 ExaoneMoE ExaoneMoe Falcon FalconH1 FalconMamba GPTBigCode GPTNeoX GPTRefact Gemma Gemma2
            Gemma3 Gemma3n Gemma4 Gemma4Assistant Gemma4UnifiedAssistant Glm Glm4 Glm4Moe Glm4MoeLite GlmMoeDsa GptOss
            Granite GraniteMoe GraniteMoeHybrid GraniteMoeSWA GraniteMoeShared GraniteSWA GraniteSwitch Grok Grok1
            GroveMoe HYV3 HYV4 HrmText HunYuanDenseV1 HunYuanMoEV1 IQuestCoder InternLM2 InternLM3 Jais2 Jamba KORMo
            KimiLinear LFM2 LLaMA Laguna Lfm2 Lfm2Moe Llama Llama4 LlavaStableLMEpoch MPT Maincoder Mamba Mamba2 Maple
            Mellum MiMoV2 MiMoV2Flash MiniCPM MiniCPM3 MiniMaxM1 MiniMaxM2 MiniMaxM3Sparse MiniMaxText01 Ministral3
            Mistral Mixtral Nanbeige Nemotron NemotronH NemotronHPuzzle OLMo Olmo Olmo2 Olmo3 Olmoe OpenELM Orion PLM
            PLaMo2 PLaMo3 PanguEmbedded Phi Phi3 PhiMoE Plamo Plamo2 Plamo3 Qwen2 Qwen2Moe Qwen3 Qwen3Moe Qwen3Next
            Qwen3_5 Qwen3_5Moe Qwen4Exp RW RWKV6Qwen2 RWKV7 RuGPT3XL Rwkv6 Rwkv7 RwkvHybrid Sarashina2Vision SarvamMoE
            SeedOss SmallThinker SmolLM3 SolarOpen Spark2_5 StableLMEpoch StableLm Starcoder2 Step3p5 Talkie
            UnlimitedOCR VLlama3 Xverse Youtu modeling_grove_moe.GroveMoe modeling_sarvam_moe.SarvamMoE
        """,
        "ForConditionalGeneration": """
            AudioFlamingo3 BailingMoeV3VL Chameleon ChatGLM Dots3Note Exaone4_5_ Gemma3 Gemma3n Gemma4 Gemma4Unified
            Glm4v Glm4vMoe Glm5Next GlmOcr GraniteSpeech GraniteSpeechPlus HunYuanVL Janus KimiK25 KimiK3 KimiVL Llama4
            Llava MT5 MiniCPMV4_6 MiniMaxM3Sparse Mistral3 MuseGlimmer PaddleOCRVL Qwen2Audio Qwen2VL Qwen2_5_VL
            Qwen3ASR Qwen3OmniMoe Qwen3TTS Qwen3VL Qwen3VLMoe Qwen3_5 Qwen3_5Moe Qwen4Exp Step3p7 StepVL T5 UMT5 Voxtral
            YoutuVL
        """,
        "": """
            BertForMaskedLM BertForSequenceClassification BertModel BloomModel CamembertModel ChatGLMModel
            DFlash2DraftModel DFlashDraftModel DSparkDraftModel DSparkSpeculator DeepseekV4DSparkModel
            DistilBertForMaskedLM DistilBertForSequenceClassification DistilBertModel DreamModel Eagle3DraftModel
            Eagle3Speculator EuroBertModel GPT2LMHeadModel Gemma3TextModel Gemma4DSparkModel JAISLMHeadModel
            JinaBertForMaskedLM JinaBertModel JinaEmbeddingsV5Model KimiLinearModel LLaDAMoEModel LLaDAMoEModelLM
            LLaDAModelLM Lfm25AudioTokenizer Lfm2BidirectionalModel Lfm2DSparkDraftModel Lfm2Model LingDSparkModel
            LlamaBidirectionalModel LlamaForCausalLMEagle3 LlamaModel MambaLMHeadModel ModernBertForMaskedLM
            ModernBertForSequenceClassification ModernBertModel MuseGlimmerAssistantModel NeoBERT
            NeoBERTForSequenceClassification NeoBERTLMHead NomicBertModel Phi4ForCausalLMV PocketTTSModel
            QWenLMHeadModel Qwen2Model Qwen2VLModel Qwen2_5OmniModel Qwen3DSparkModel Qwen3Model RND1
            RobertaForSequenceClassification RobertaModel T5EncoderModel T5WithLMHeadModel UMT5Model UltravoxModel
            WavTokenizerDec XLMRobertaForSequenceClassification XLMRobertaModel
        """,
    }
)

# Architectures whose vision tower and projector the converter can write to a file of their own.
PROJECTORS = _names(
    {
        "ForCausalLM": """
            CogVLM DeepseekOCR DeepseekOCR2 DeepseekV4 Dots3Note DotsOCR MiMoV2 Sarashina2Vision UnlimitedOCR
        """,
        "ForConditionalGeneration": """
            AudioFlamingo3 BailingMoeV3VL Dots3Note Exaone4_5_ Gemma3 Gemma3n Gemma4 Gemma4Unified Glm4v Glm4vMoe
            Glm5Next Glm5v GlmOcr Granite4Vision GraniteSpeech GraniteSpeechPlus HunYuanVL Idefics3 Janus KimiK25 KimiVL
            Lfm2Audio Lfm2Vl LightOnOCR Llama4 Llava MERaLiON2 MiniCPMV4_6 MiniMaxM3Sparse Mistral3 MuseGlimmer
            Qwen2Audio Qwen2VL Qwen2_5_VL Qwen3ASR Qwen3OmniMoe Qwen3TTS Qwen3VL Qwen3VLMoe Qwen3_5 Qwen3_5Moe Qwen4Exp
            SmolVLM Step3p7 StepVL Voxtral YoutuVL
        """,
        "": """
            GlmasrModel InternVisionModel NemotronH_Nano_VL_V2 PaddleOCRVisionModel Phi4ForCausalLMV PocketTTSModel
            Qwen2VLModel Qwen2_5OmniModel RADIOModel UltravoxModel
        """,
    }
)
