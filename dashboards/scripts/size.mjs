// The budget of the first load: everything that index.html names, compressed as the service sends it.
import { readFileSync, readdirSync, statSync } from "node:fs";
import { join } from "node:path";
import { gzipSync } from "node:zlib";

const LIMIT = 90 * 1024;
const root = join(import.meta.dirname, "..", "dist");
const page = readFileSync(join(root, "index.html"), "utf8");
const names = [...page.matchAll(/(?:src|href)="\.?\/?([^"#]+)"/g)].map((match) => match[1]);
const files = ["index.html", ...names];
let total = 0;
for (const name of files) {
  const size = gzipSync(readFileSync(join(root, name)), { level: 6 }).length;
  total += size;
  console.log(`${(size / 1024).toFixed(1).padStart(7)} KB  ${name}`);
}
const all = readdirSync(root, { recursive: true }).filter((name) => statSync(join(root, name)).isFile());
const loose = all.filter((name) => name.endsWith(".map"));
console.log(`${(total / 1024).toFixed(1).padStart(7)} KB  first load, gzip (limit ${LIMIT / 1024} KB)`);
if (loose.length) throw new Error(`source maps do not belong into the package: ${loose.join(", ")}`);
if (total > LIMIT) throw new Error(`the first load is ${total} bytes compressed; the limit is ${LIMIT}`);
