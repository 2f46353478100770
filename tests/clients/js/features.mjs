// What the scripts of all JavaScript clients share; python/features.py says how.

export const URL = process.env.KVASIR_URL;
export const BASE_URL = `${URL}/v1`;
export const KEY = "none";
export const WRITER = "writer";
export const CALLER = "caller";
export const EMBEDDER = "embedder";
export const CODER = "coder";
export const QUESTION = "What is the weather in Paris?";
export const ANSWER = "The weather in Paris is ";
export const VECTOR_SIZE = 96;
export const CITY_SCHEMA = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
};

export async function report(features) {
  for (const [name, feature] of Object.entries(features)) {
    const error = await feature().then(() => null, (error) => error.stack);
    const words = name.replaceAll("_", " ");
    console.log(JSON.stringify({ feature: words, error }));
  }
}
