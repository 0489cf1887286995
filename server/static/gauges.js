// What /metrics tells, read once a second and turned into rates.

/** {name: value}, summed over labels; names are without the server's prefix. */
export function parse(text) {
  const prefix = /^(\S*?)num_requests_running\{/m.exec(text)?.[1] ?? "";
  const values = {};
  for (const line of text.split("\n")) {
    const found = /^([^\s{#]+)(?:\{.*\})? (\S+)$/.exec(line);
    if (!found || !found[1].startsWith(prefix)) continue;
    const name = found[1].slice(prefix.length);
    values[name] = (values[name] ?? 0) + Number(found[2]);
  }
  return values;
}

/** What happened between two readings, `seconds` apart; null where nothing was counted. */
export function between(before, after, seconds) {
  const grown = (name) => Math.max(0, (after[name] ?? 0) - (before[name] ?? 0));
  const ratio = (over, under) => (grown(under) > 0 ? grown(over) / grown(under) : null);
  return {
    running: after.num_requests_running ?? 0,
    waiting: after.num_requests_waiting ?? 0,
    verifyLength: ratio("verify_length_sum", "verify_length_count"),
    acceptedLength: ratio("accepted_length_sum", "accepted_length_count"),
    predictedTokens: grown("forecast_tokens_total") / seconds,
    measuredTokens: grown("forecast_measured_tokens_total") / seconds,
    predictedTime: grown("forecast_seconds_total") / seconds,
    measuredTime: grown("forecast_measured_seconds_total") / seconds,
    tokens: grown("generation_tokens_total") / seconds,
  };
}
