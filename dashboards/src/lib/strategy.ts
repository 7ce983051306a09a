/* Strategies in human words. Pure; knows the wire form, no network. */
import type { JobSpec } from "../job";
import type { PhaseWire, StrategySpec, StrategyWire } from "../types";

/** The phases of a strategy in any of its three forms (text, one strategy, list of phases). */
export function phases(spec: StrategySpec | null | undefined): PhaseWire[] {
  if (spec === null || spec === undefined) return [{ strategy: { name: "all_reduce" } }];
  if (typeof spec === "string") return [{ strategy: parseText(spec) }];
  if (Array.isArray(spec)) return spec.map((phase) => ({ epochs: phase.epochs ?? null, strategy: one(phase.strategy) }));
  return [{ strategy: spec }];
}

/** One strategy in words: "Parameter server, asynchronous, 2 shards". */
export function words(strategy: StrategyWire): string {
  if (strategy.name in REPLICAS) return replicaWords(strategy, true);
  if (strategy.name === "all_reduce") return "All-reduce" + replicaOf(strategy);
  if (strategy.name === "hybrid") return hybrid(strategy);
  if (strategy.name === "downpour") return downpour(strategy);
  if (plain(strategy.name) in FEDERATED) return federated(strategy);
  if (plain(strategy.name) in APART) return apart(strategy);
  if (strategy.name !== "parameter_server") return sentence(strategy.name) + others(strategy, []);
  const parts = ["Parameter server"];
  if ("staleness" in strategy) parts.push(staleWords(strategy["staleness"]));
  const shards = strategy["shards"];
  if (typeof shards === "number") parts.push(shards === 1 ? "1 shard" : `${shards} shards`);
  const copies = copyWords(strategy["replicas"]);
  return parts.join(", ") + (copies && `, ${copies}`) + replicaOf(strategy) + others(strategy, ["staleness", "shards", "replicas", "replica"]);
}

/** One strategy without its number of shards, for a narrow column. */
export function brief(spec: StrategySpec | null | undefined): string {
  return phases(spec).map(({ strategy }) => words({ ...strategy, shards: undefined })).join(" → ");
}

/** The shards of a strategy in words; "" where there are none. */
export function shardWords(spec: StrategySpec | null | undefined): string {
  const shards = phases(spec).map(({ strategy }) => strategy["shards"]).find((value) => typeof value === "number");
  return typeof shards === "number" ? (shards === 1 ? "1 shard" : `${shards} shards`) : "";
}

/** A whole strategy in words; phases are joined by an arrow. */
export function describe(spec: StrategySpec | null | undefined): string {
  return phases(spec).map((phase) => words(phase.strategy)).join(" → ");
}

/** The shortest label of a strategy, for a band in a chart. */
export function label(strategy: StrategyWire): string {
  if (strategy.name === "all_reduce") return "All-reduce";
  if (strategy.name !== "parameter_server") return FEDERATED[plain(strategy.name)] ?? APART[plain(strategy.name)] ?? sentence(strategy.name);
  return "staleness" in strategy ? `Server, ${staleWords(strategy["staleness"])}` : "Parameter server";
}

/** Whether any phase uses a parameter server (and so has shards and staleness). */
export function usesServer(spec: StrategySpec | null | undefined): boolean {
  return phases(spec).some((phase) => phase.strategy.name === "parameter_server" || phase.strategy.name === "downpour");
}

/** Whether any phase asks clients. */
export function isFederated(spec: StrategySpec | null | undefined): boolean {
  return phases(spec).some(({ strategy }) => plain(strategy.name) in FEDERATED);
}

/** Whether in any phase the clients are processes of their own, whose seconds are real. */
export function hasRealClients(spec: StrategySpec | null | undefined): boolean {
  return phases(spec).some(({ strategy }) => plain(strategy.name) in FEDERATED && "clients" in unusual(strategy));
}

/** The bound of each client's metrics, where they are summed under masks or with noise; null where they are not cut. */
export function metricBound(spec: StrategySpec | null | undefined): number | null {
  const found = phases(spec).map(({ strategy }) => strategy).find((each) => each["client_evaluation"] && (each["secure"] || each["privacy"]));
  return found ? Number(found["metric_bound"] ?? 1) : null;
}

/** What simulated attackers do, as it is written: "sign_flip(clients=4)"; null where there are none. */
export function attack(spec: StrategySpec | null | undefined): string | null {
  const found = phases(spec).map(({ strategy }) => strategy["attack"]).find((value) => value !== null && value !== undefined);
  return found === undefined ? null : String(written(found));
}

/** Whether in any phase the workers learn apart and meet now and then. */
export function meetsNowAndThen(spec: StrategySpec | null | undefined): boolean {
  return phases(spec).some(({ strategy }) => plain(strategy.name) in APART && strategy.name !== "admm");
}

export function usesAdmm(spec: StrategySpec | null | undefined): boolean {
  return phases(spec).some(({ strategy }) => strategy.name === "admm");
}

/** Whether in any phase an update may be older than the model that takes it. */
export function hasStaleness(spec: StrategySpec | null | undefined): boolean {
  return usesServer(spec) || phases(spec).some(({ strategy }) => plain(strategy.name) === "fedbuff");
}

/** Whether in any phase a replica is a pipeline of several stages. */
export function usesPipeline(spec: StrategySpec | null | undefined): boolean {
  return phases(spec).some(({ strategy }) => {
    const replica = strategy.name in REPLICAS ? strategy : nested(strategy["replica"]);
    return replica?.name === "pipeline" && replica["stages"] !== 1;
  });
}

/** The widest bound on staleness over all phases; null = asynchronous or not known. */
export function staleBound(spec: StrategySpec | null | undefined): number | null {
  let bound = 0;
  for (const { strategy } of phases(spec)) {
    if (strategy.name === "downpour") return null;
    if (plain(strategy.name) === "fedbuff") return typeof strategy["max_staleness"] === "number" ? strategy["max_staleness"] : null;
    if (strategy.name !== "parameter_server") continue;
    const value = "staleness" in strategy ? strategy["staleness"] : 0;
    if (typeof value !== "number") return null;
    bound = Math.max(bound, value);
  }
  return bound;
}

/** The strategy at work now: by its own name where progress says it, filled in from the job's spec. */
export function current(progress: StrategySpec | undefined, spec: StrategySpec | undefined): StrategyWire {
  const all = phases(spec);
  const now = progress === undefined ? undefined : phases(progress)[0]?.strategy;
  if (!now) return all[0]?.strategy ?? { name: "all_reduce" };
  if (Object.keys(now).length > 1) return now;
  return all.find((phase) => phase.strategy.name === now.name)?.strategy ?? now;
}

/** A job's length in words: "3 epochs", "30 rounds" of clients, "500 steps", "" when neither was given. */
export function length(spec: JobSpec): string {
  if (spec.epochs && phases(spec.strategy).every(({ strategy }) => plain(strategy.name) in FEDERATED)) return spec.epochs === 1 ? "1 round" : `${spec.epochs} rounds`;
  if (spec.epochs) return spec.epochs === 1 ? "1 epoch" : `${spec.epochs} epochs`;
  if (spec.steps) return spec.steps === 1 ? "1 step" : `${spec.steps} steps`;
  return "";
}

function one(strategy: StrategyWire | string): StrategyWire {
  return typeof strategy === "string" ? parseText(strategy) : strategy;
}

function parseText(source: string): StrategyWire {
  const [name = "", rest = ""] = source.split(/:(.*)/s);
  const out: StrategyWire = { name: name.trim() };
  for (const pair of topLevel(rest)) {
    const [key = "", value = ""] = pair.split(/=(.*)/s);
    out[key.trim()] = value.trim() === "none" ? null : Number.isNaN(Number(value)) ? value.trim() : Number(value);
  }
  return out;
}

/** Options between commas, but not those within parentheses. */
function topLevel(source: string): string[] {
  const found: string[] = [];
  let depth = 0;
  let from = 0;
  for (let i = 0; i <= source.length; i += 1) {
    const letter = source[i];
    if (letter === "(") depth += 1;
    if (letter === ")") depth -= 1;
    if (letter === undefined || (letter === "," && depth === 0)) {
      found.push(source.slice(from, i));
      from = i + 1;
    }
  }
  return found.filter((part) => part.trim());
}

/** What a copy of the model is, where it is several workers: "pipeline of 4 stages, 8 micro-batches, 1f1b". */
const REPLICAS: Record<string, true> = { pipeline: true, tensor_parallel: true };

function replicaOf(strategy: StrategyWire): string {
  const replica = nested(strategy["replica"]);
  return replica ? `, ${replicaWords(replica)}` : "";
}

function replicaWords(replica: StrategyWire, first = false): string {
  const said = replica.name === "tensor_parallel" ? `tensor parallel over ${number(replica["size"], 2)}` : pipelineWords(replica);
  return first ? said.charAt(0).toUpperCase() + said.slice(1) : said;
}

function pipelineWords(replica: StrategyWire): string {
  const inner = nested(replica["stage"]);
  const chunks = number(replica["chunks"], 1);
  return [
    `pipeline of ${number(replica["stages"], 2)} stages${chunks > 1 ? ` x ${chunks} chunks` : ""}`, `${number(replica["micro_batches"], 4)} micro-batches`,
    typeof replica["schedule"] === "string" ? replica["schedule"].replaceAll("_", " ") : "1f1b", inner ? `each stage ${replicaWords(inner)}` : "",
  ].filter(Boolean).join(", ");
}

function nested(value: unknown): StrategyWire | null {
  if (typeof value === "string") {
    const match = /^\s*(\w+)\s*(?:\((.*)\))?\s*$/s.exec(value);
    return match ? parseText(`${match[1]}:${match[2] ?? ""}`) : null;
  }
  return value !== null && typeof value === "object" && typeof (value as StrategyWire).name === "string" ? (value as StrategyWire) : null;
}

function number(value: unknown, otherwise: number): number {
  return typeof value === "number" ? value : otherwise;
}

function downpour(strategy: StrategyWire): string {
  const shards = number(strategy["shards"], 1);
  const every = `pushes every ${number(strategy["n_push"], 1)}, fetches every ${number(strategy["n_fetch"], 1)}`;
  const said = ["n_push", "n_fetch", "shards", "replica", ...["adagrad", "warm_start", "replay_mb"].filter((key) => !strategy[key])];
  return `Downpour, ${every}, ${shards === 1 ? "1 shard" : `${shards} shards`}${replicaOf(strategy)}${others(strategy, said)}`;
}

/** Dense part by all-reduce, tables on servers; switches that stand as they usually do are left out. */
function hybrid(strategy: StrategyWire): string {
  const servers = strategy["servers"];
  const parts = ["Hybrid", typeof servers === "number" ? `tables on ${servers === 1 ? "1 server" : `${servers} servers`}` : "", staleWords(strategy["staleness"] ?? null), copyWords(strategy["replicas"])];
  const said = ["servers", "staleness", "replicas", ...(strategy["prefetch"] === false ? [] : ["prefetch"]), ...["compression", "bucket_mb"].filter((key) => strategy[key] == null)];
  return parts.filter(Boolean).join(", ") + others(strategy, said);
}

/** Strategies of clients, as their papers spell them. */
const FEDERATED: Record<string, string> = {
  fedavg: "FedAvg", fedprox: "FedProx", scaffold: "Scaffold", fedavgm: "FedAvgM", fedadagrad: "FedAdagrad", fedadam: "FedAdam",
  fedyogi: "FedYogi", fedbuff: "FedBuff", ditto: "Ditto", fedper: "FedPer", fedrep: "FedRep", statistics: "Statistics",
};

/** Strategies whose workers learn apart. */
const APART: Record<string, string> = { localsgd: "Local SGD", parallelsgd: "Parallel SGD", diloco: "DiLoCo", admm: "ADMM" };

/** What is not worth a word, because it is what one gets without asking. */
const USUAL: Record<string, unknown[]> = {
  fraction: [1], local_epochs: [1], rule: ["mean"], dropout: [0], min_replies: [1], evaluate_every: [1], over_selection: [0],
  buffers: ["mean", "average"], clients: ["simulated"], momentum: ["keep"], merge: ["mean"], shuffle: [true], warmup: [0],
  overlap: [0], buckets: [1], participation: [1], relaxation: [1], client_evaluation: [false], metric_bound: [1],
};

function plain(name: string): string {
  return name.replaceAll("_", "");
}

function unusual(strategy: StrategyWire): StrategyWire {
  return Object.fromEntries(Object.entries(strategy).filter(([key, value]) => value !== null && value !== undefined && !USUAL[key]?.includes(value))) as StrategyWire;
}

function federated(strategy: StrategyWire): string {
  const own = unusual(strategy);
  const part = (key: string, say: (value: unknown) => string) => (key in own ? say(own[key]) : "");
  const epochs = "local_steps" in own ? `${String(own["local_steps"])} local steps` : part("local_epochs", (value) => `${String(value)} local epochs`);
  const said = ["fraction", "local_epochs", "local_steps", "batch_size", "rule", "dropout", "attack", "clients", "privacy", "secure"];
  const parts = [
    FEDERATED[plain(own.name)], part("clients", (value) => `${String(written(value))} clients`), part("fraction", (value) => `${percentage(value)} of the clients per round`), epochs,
    part("batch_size", (value) => `batches of ${String(value)}`), part("rule", (value) => String(written(value))),
    part("attack", (value) => `under attack by ${String(written(value))}`), part("dropout", (value) => `${percentage(value)} drop out`),
    part("privacy", privacyWords), part("secure", () => "secure sums"),
  ];
  return parts.filter(Boolean).join(", ") + others(own, said);
}

function apart(strategy: StrategyWire): string {
  const { period, ...rest } = unusual(strategy);
  const every = typeof period === "number" ? `, averages every ${period === 1 ? "round" : `${period} rounds`}` : "";
  return APART[plain(strategy.name)] + every + others(rest as StrategyWire, []);
}

/** The option `privacy` in words: its budget, or its noise. */
export function privacyWords(value: unknown): string {
  const found = (typeof value === "string" ? Object.fromEntries([...value.matchAll(/(\w+)=([^,)]+)/g)].map((each) => [each[1], each[2]])) : value) as Record<string, unknown>;
  return found?.["epsilon"] ? `private, ε ≤ ${String(found["epsilon"])}` : `private, noise ${String(found?.["noise_multiplier"] ?? "?")}`;
}

function percentage(value: unknown): string {
  return typeof value === "number" ? `${Number((100 * value).toFixed(2))}%` : String(value);
}

/** An option that has options of its own, as it is written: krum(f=4). */
function written(value: unknown): unknown {
  if (value === null || typeof value !== "object" || Array.isArray(value)) return value;
  const { name, ...rest } = value as Record<string, unknown>;
  const inside = Object.entries(rest).filter(([, each]) => each !== null).map(([key, each]) => `${key}=${String(written(each))}`).join(",");
  return inside ? `${String(name)}(${inside})` : String(name);
}

function copyWords(replicas: unknown): string {
  return typeof replicas !== "number" || replicas === 0 ? "" : replicas === 1 ? "1 backup" : `${replicas} backups`;
}

function staleWords(value: unknown): string {
  if (value === null || value === "none") return "asynchronous";
  if (value === "auto") return "staleness that adapts";
  return value === 0 ? "synchronous" : `staleness ≤ ${String(value)}`;
}

function sentence(name: string): string {
  const spaced = name.replaceAll("_", " ");
  return spaced.charAt(0).toUpperCase() + spaced.slice(1);
}

function others(strategy: StrategyWire, said: string[]): string {
  const rest = Object.entries(strategy).filter(([key, value]) => key !== "name" && value !== undefined && !said.includes(key));
  return rest.length ? `, ${rest.map(([key, value]) => `${key.replaceAll("_", " ")} ${String(written(value))}`).join(", ")}` : "";
}

/** The name of a job's code: of its workload, or of its function. */
export function target(spec: JobSpec): string {
  return spec.workload || spec.run || "";
}
