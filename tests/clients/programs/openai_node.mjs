// openai's npm SDK. Arguments: the URL of an open router, of one with keys and one place, the key.
// Prints one line of JSON per case, as the Python programs do.
import OpenAI from 'openai';
import { zodFunction, zodResponseFormat } from 'openai/helpers/zod';
import { z } from 'zod';

const [url, narrowUrl, key] = process.argv.slice(2);
const client = new OpenAI({ baseURL: url, apiKey: 'none', timeout: 90_000, maxRetries: 0 });
const question = [{ role: 'user', content: 'What is the capital of France?' }];
const weatherQuestion = [{ role: 'user', content: 'How will the weather be in Rome in the next 3 days?' }];
const Weather = z.object({ city: z.enum(['Paris', 'Rome']), days: z.number().int() });
const Person = z.object({ name: z.string(), age: z.number().int(), role: z.enum(['cook', 'guard']) });
const forced = { type: 'function', function: { name: 'get_weather' } };
const endless = { model: 'default', prompt: 'One, two,', max_tokens: 4000, temperature: 0 };
const options = { model: 'default', messages: question, max_tokens: 16, temperature: 0 };

async function error(make) {
  try {
    await make();
  } catch (e) {
    if (e instanceof OpenAI.APIError) return [e.constructor.name, e.status ?? null, e.type ?? null, e.code ?? null, e.param ?? null];
    throw e;
  }
  return 'no error';
}

const cases = {
  async models() {
    const names = [];
    for await (const model of client.models.list()) names.push(model.id);
    return [names, (await client.models.retrieve('default')).object];
  },
  async plain() {
    const reply = await client.chat.completions.create(options);
    return [reply.choices[0].message.content, reply.choices[0].finish_reason, reply.usage.completion_tokens];
  },
  async stream() {
    let text = '', usage = null;
    for await (const chunk of await client.chat.completions.create({ ...options, stream: true, stream_options: { include_usage: true } })) {
      text += chunk.choices[0]?.delta.content ?? '';
      usage = chunk.usage ?? usage;
    }
    const helper = client.chat.completions.stream(options);
    return [text, await helper.finalContent(), usage.completion_tokens];
  },
  async streamed_tool() {
    const tool = zodFunction({ name: 'get_weather', parameters: Weather });
    const more = { messages: weatherQuestion, tools: [tool], tool_choice: forced, max_tokens: 60 };
    const choice = (await client.chat.completions.stream({ ...options, ...more }).finalChatCompletion()).choices[0];
    const call = choice.message.tool_calls[0];
    return [call.function.name, call.function.parsed_arguments, choice.finish_reason];
  },
  async tool_round() {
    // The SDK calls the function and sends its result back; the answer after that is the model's own.
    const asked = [];
    const tool = zodFunction({ name: 'get_weather', parameters: Weather, function: (a) => { asked.push(a); return 'sunny'; } });
    const runner = client.chat.completions.runTools({ ...options, messages: weatherQuestion, tools: [tool], tool_choice: forced, max_tokens: 60 });
    await runner.done();
    return [asked, runner.messages.map((m) => m.role)];
  },
  async parsed() {
    const messages = [{ role: 'user', content: 'Make up a person.' }];
    const reply = await client.chat.completions.parse({ ...options, messages, response_format: zodResponseFormat(Person, 'person'), max_tokens: 100 });
    return reply.choices[0].message.parsed;
  },
  async logprobs() {
    const reply = await client.chat.completions.create({ ...options, logprobs: true, top_logprobs: 2, max_tokens: 4 });
    const content = reply.choices[0].logprobs.content;
    const text = Buffer.from(content.flatMap((t) => t.bytes)).toString();
    return [text === reply.choices[0].message.content, content.map((t) => [t.logprob, t.top_logprobs.map((x) => x.logprob)])];
  },
  async completion() {
    const body = { model: 'default', prompt: 'The capital of France is', max_tokens: 3, temperature: 0 };
    const { text, logprobs } = (await client.completions.create({ ...body, echo: true, logprobs: 2 })).choices[0];
    let streamed = '';
    for await (const chunk of await client.completions.create({ ...body, stream: true })) streamed += chunk.choices[0].text;
    return { text, tokens: logprobs.tokens, offsets: logprobs.text_offset, logprobs: logprobs.token_logprobs, streamed };
  },
  async errors() {
    const keyless = new OpenAI({ baseURL: narrowUrl, apiKey: 'wrong', maxRetries: 0, timeout: 60_000 });
    return {
      400: await error(() => client.chat.completions.create({ ...options, temperature: 3 })),
      401: await error(() => keyless.models.list()),
      404: await error(() => client.chat.completions.create({ ...options, model: 'nobody' })),
    };
  },
  async full_queue() {
    const narrow = new OpenAI({ baseURL: narrowUrl, apiKey: key, maxRetries: 0, timeout: 90_000 });
    const running = await narrow.completions.create({ ...endless, stream: true });
    let refused = null;
    for await (const _ of running) {
      refused = await error(() => narrow.completions.create({ ...endless, max_tokens: 1 }));
      break; // which aborts the request
    }
    const patient = await narrow.completions.create({ ...endless, max_tokens: 1 }, { maxRetries: 10 });
    return [refused, patient.usage.completion_tokens];
  },
  async timeout() {
    return await error(() => client.completions.create(endless, { timeout: 1000, headers: { 'x-request-id': 'node-late' } }));
  },
  async aborted() {
    const controller = new AbortController();
    const running = await client.completions.create({ ...endless, stream: true }, { signal: controller.signal, headers: { 'x-request-id': 'node-left' } });
    let got = 0;
    for await (const _ of running) if (++got === 2) controller.abort();
    return got >= 2;
  },
};

for (const [name, make] of Object.entries(cases)) {
  try {
    console.log(JSON.stringify({ case: name, value: await make() }));
  } catch (e) {
    console.log(JSON.stringify({ case: name, error: String(e.stack ?? e) }));
  }
}
