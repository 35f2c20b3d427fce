// Prints what transformers.js computes of an exported folder, as JSON: node transformers_js.mjs MODULES FOLDER TASK DTYPE TEXTS
import { createRequire } from 'node:module';
import path from 'node:path';
import { pathToFileURL } from 'node:url';

const [modules, folder, task, dtype, texts] = process.argv.slice(2);
const main = createRequire(path.join(modules, 'here.js')).resolve('@huggingface/transformers');
const { env, pipeline } = await import(pathToFileURL(main));
env.allowRemoteModels = false;
env.localModelPath = path.dirname(folder) + path.sep;
const options = task === 'feature-extraction' ? { pooling: 'mean', normalize: true } : { top_k: null };
const compute = await pipeline(task, path.basename(folder), { dtype });
const results = [];
for (const text of JSON.parse(texts)) {
  const found = await compute(text, options);
  results.push(task === 'feature-extraction' ? found.tolist()[0] : Object.fromEntries(found.map(each => [each.label, each.score])));
}
console.log(JSON.stringify(results));
