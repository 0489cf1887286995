// The page: a conversation whose tokens show how they came about, and the server's charts.

import { Chart, element } from "./chart.js";
import { between, parse } from "./gauges.js";
import { chat } from "./stream.js";

const $ = (id) => document.getElementById(id);
const WORDS = { draft: "accepted draft", correction: "correction of a draft", bonus: "bonus token", plain: "not drafted" };

let turns = [];
let running = null; // the AbortController of the answer under way

// ---- the conversation

function newTurn(name) {
  const turn = document.createElement("p");
  const who = document.createElement("b");
  turn.className = "turn";
  who.textContent = name;
  turn.append(who);
  $("conversation").append(turn);
  return turn;
}

function write(turn, text, origin) {
  if (!text) return;
  const span = document.createElement("span");
  span.className = `token ${origin}`;
  span.title = WORDS[origin];
  span.textContent = text;
  turn.append(span);
  $("conversation").scrollTop = $("conversation").scrollHeight;
}

function bar(verified, accepted, most) {
  const svg = element("svg", { viewBox: `0 0 8 ${most}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  const height = Math.max(verified, 0.15);
  svg.append(element("rect", { class: "accepted", x: 1, width: 6, y: most - accepted, height: accepted }));
  svg.append(element("rect", { class: "verified", x: 1, width: 6, y: most - height, height, "vector-effect": "non-scaling-stroke" }));
  const title = element("title", {});
  title.textContent = `${accepted} of ${verified} drafts accepted`;
  svg.append(title);
  return svg;
}

function showSteps(steps) {
  const most = Math.max(...steps.map((step) => step.verified), 4);
  $("steps").replaceChildren(...steps.map((step) => bar(step.verified, step.accepted, most)));
  $("steps").scrollLeft = $("steps").scrollWidth;
  const verified = steps.reduce((sum, step) => sum + step.verified, 0);
  const accepted = steps.reduce((sum, step) => sum + step.accepted, 0);
  const tokens = steps.reduce((sum, step) => sum + step.tokens.length, 0);
  const told = `${steps.length} steps wrote ${tokens} tokens; ${accepted} of ${verified} verified drafts were accepted.`;
  $("steps").setAttribute("aria-label", told);
  $("summary").textContent = `${told} Outline: verified; filled: accepted.`;
}

async function send() {
  const words = $("prompt").value.trim();
  if (!words || running) return;
  running = new AbortController();
  $("error").textContent = "";
  $("send").disabled = true;
  $("stop").disabled = false;
  $("announcement").textContent = "Answering.";
  turns.push({ role: "user", content: words });
  newTurn("You").append(words);
  const turn = newTurn("Model");
  const decoder = new TextDecoder();
  const steps = [];
  let answer = "";
  const body = {
    messages: turns,
    stream: true,
    stream_options: { include_speculation: true },
    temperature: Number($("temperature").value),
    max_tokens: Number($("max-tokens").value),
  };
  if ($("drafts").value !== "") body.num_speculative_tokens = Number($("drafts").value);
  try {
    for await (const chunk of chat(body, $("key").value, running.signal)) {
      const choice = chunk.choices[0];
      answer += choice?.delta?.content ?? "";
      if (!choice?.speculation) continue;
      for (const step of choice.speculation.steps) {
        steps.push(step);
        for (const token of step.tokens) {
          write(turn, decoder.decode(new Uint8Array(token.bytes), { stream: true }), token.origin);
        }
      }
      showSteps(steps);
    }
  } catch (problem) {
    if (problem.name !== "AbortError") $("error").textContent = problem.message;
  }
  if (answer) turns.push({ role: "assistant", content: answer });
  else turns.pop();
  $("announcement").textContent = answer || "No answer.";
  $("send").disabled = false;
  $("stop").disabled = true;
  running = null;
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("stop").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", () => {
  running?.abort();
  turns = [];
  $("conversation").replaceChildren();
  $("steps").replaceChildren();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send();
  if (event.key === "Escape") running?.abort();
});
for (let count = 1; count <= 16; count++) $("drafts").append(new Option(`at most ${count}`, count));

// ---- load on request: so many short answers at once, again and again

const QUESTIONS = ["Tell a story about a river.", "Explain what rain is.", "Write a poem about bread.", "Describe a busy street."];
const loaders = [];

async function load(stop) {
  for (let turn = 0; !stop.signal.aborted; turn++) {
    const messages = [{ role: "user", content: QUESTIONS[turn % QUESTIONS.length] }];
    try {
      const pieces = chat({ messages, stream: true, max_tokens: 100, temperature: 1 }, $("key").value, stop.signal);
      while (!(await pieces.next()).done);
    } catch (problem) {
      if (stop.signal.aborted) return;
      $("live-error").textContent = problem.message;
      await new Promise((resolve) => setTimeout(resolve, 1000));
    }
  }
}

$("load").addEventListener("input", () => {
  const wanted = Number($("load").value);
  $("load-shown").value = wanted;
  while (loaders.length > wanted) loaders.pop().abort();
  while (loaders.length < wanted) {
    const stop = new AbortController();
    loaders.push(stop);
    load(stop);
  }
});

// ---- the charts

const curve = (label, value) => ({ label, value });
const charts = [
  new Chart($("charts"), "Load", "requests", [curve("running", (now) => now.running), curve("waiting", (now) => now.waiting)]),
  new Chart($("charts"), "Length", "tokens", [curve("drafts verified", (now) => now.verifyLength), curve("accepted and bonus", (now) => now.acceptedLength)]),
  new Chart($("charts"), "Tokens", "a second", [curve("generated", (now) => now.tokens)]),
  new Chart($("charts"), "Tokens of steps with a forecast", "a second", [curve("predicted", (now) => now.predictedTokens), curve("measured", (now) => now.measuredTokens)]),
  new Chart($("charts"), "Time of steps with a forecast", "seconds a second", [curve("predicted", (now) => now.predictedTime), curve("measured", (now) => now.measuredTime)]),
];

let before = null;

async function read() {
  try {
    const reply = await fetch("metrics", { headers: { Accept: "text/plain" } });
    if (!reply.ok) throw new Error();
    const now = { at: performance.now(), values: parse(await reply.text()) };
    if (before) {
      const sample = between(before.values, now.values, (now.at - before.at) / 1000);
      for (const chart of charts) chart.add(sample);
    }
    before = now;
    if (!loaders.length) $("live-error").textContent = "";
  } catch {
    $("live-error").textContent = "The server's /metrics cannot be read from here.";
  }
  setTimeout(read, 1000);
}

async function greet() {
  const version = await fetch("version").then((reply) => reply.json());
  const engine = version.engine;
  $("model").textContent = engine
    ? `${engine.model}, ${engine.dtype} on ${engine.device}; drafter ${engine.drafter}, policy ${engine.verify_policy}`
    : "The model is loading.";
  if (!engine) setTimeout(greet, 2000);
}

greet();
read();
