/* Reading JSON that a numerical program wrote: a bare NaN or Infinity becomes null instead of an error. */

const BARE = /([:[,]\s*)(-?Infinity|NaN)(?=\s*[,}\]])/g;

/** Parse JSON; bare NaN and Infinity are read as null. Throws SyntaxError for anything else that is not JSON. */
export function parse(source: string): unknown {
  try {
    return JSON.parse(source);
  } catch (error) {
    const cleaned = outsideStrings(source, (part) => part.replace(BARE, "$1null"));
    if (cleaned === source) throw error;
    return JSON.parse(cleaned);
  }
}

/** Apply `change` to the parts of JSON text that are not inside a string. */
function outsideStrings(source: string, change: (part: string) => string): string {
  return source
    .split(/("(?:[^"\\]|\\.)*")/)
    .map((part, i) => (i % 2 ? part : change(part)))
    .join("");
}
