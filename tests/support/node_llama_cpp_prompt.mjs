// What node-llama-cpp writes for one question: node node_llama_cpp_prompt.mjs FOLDER FILE.gguf default|own
// FOLDER holds node_modules. `own` is what references/engines.md says to set.
import {createRequire} from "node:module";
import {pathToFileURL} from "node:url";

const [folder, file, how] = process.argv.slice(2);
const place = createRequire(folder + "/package.json").resolve("node-llama-cpp");
const {getLlama, LlamaChatSession, resolveChatWrapper} = await import(pathToFileURL(place).href);

const llama = await getLlama({gpu: false, build: "never", logLevel: "error"});
const model = await llama.loadModel({modelPath: file, gpuLayers: 0});
const context = await model.createContext({contextSize: 1024});
const own = how === "own";
const session = new LlamaChatSession({
    contextSequence: context.getSequence(),
    chatWrapper: own ? resolveChatWrapper(model, {type: "jinjaTemplate"}) : resolveChatWrapper(model)
});
if (own)
    session.setChatHistory([]);
const answer = await session.prompt("Is it raining in Oslo?", {maxTokens: 1, temperature: 0});
console.log(JSON.stringify({wrapper: session.chatWrapper.wrapperName, ids: session.sequence.contextTokens, answer}));
process.exit(0);
