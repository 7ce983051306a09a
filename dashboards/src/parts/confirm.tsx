/* A question before something changes. */
import { useSignal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { session } from "../stream";
import { Dialog } from "./bits";

/** A question with one way on and one way back; what the service refuses is shown in it. */
export function Confirm({ title, open, onClose, word, back, act, ready = true, plain = false, children }: {
  title: string; open: boolean; onClose: () => void; word: string; back: string; act: () => Promise<void>; ready?: boolean; plain?: boolean; children: preact.ComponentChildren;
}) {
  const busy = useSignal(false);
  const error = useSignal("");
  useEffect(() => {
    if (open) error.value = "";
  }, [open]);
  const go = async () => {
    busy.value = true;
    try {
      await act();
      onClose();
    } catch (reason) {
      if ((reason as { status?: number }).status === 401) session.value = false;
      error.value = (reason as Error).message;
    } finally {
      busy.value = false;
    }
  };
  return (
    <Dialog title={title} open={open} onClose={onClose}>
      {children}
      {error.value && <p class="form-error" role="alert">{error.value}</p>}
      <div class="dialog-actions">
        <button type="button" class="button" onClick={onClose}>{back}</button>
        <button type="button" class={`button ${plain ? "button-primary" : "button-danger-solid"}`} disabled={busy.value || !ready} onClick={go}>{busy.value ? "Asking" : word}</button>
      </div>
    </Dialog>
  );
}
