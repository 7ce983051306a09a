// The page of something that is not there, or that could not be loaded.
import type { ComponentChildren } from "preact";
import { Empty } from "./bits";

interface Props {
  what: string; // job, server group
  status: number; // of the answer
  text: string; // what went wrong
  gone: ComponentChildren; // why it may not be there
  all: { href: string; text: string }; // where the others are
  onRetry: () => void;
}

export function Missing({ what, status, text, gone, all, onRetry }: Props) {
  const absent = status === 404;
  return (
    <main class="page">
      <Empty title={absent ? `There is no such ${what}` : `The ${what} could not be loaded`}>
        <p>{absent ? gone : text}</p>
        <p class="empty-actions">
          <a class="button" href={all.href}>{all.text}</a>
          {!absent && <button type="button" class="button" onClick={onRetry}>Try again</button>}
        </p>
      </Empty>
    </main>
  );
}
