/*
 * The one module that knows uPlot. A chart is drawn only while it is near the view, keeps its zoom while data comes in, is
 * moved through with the arrow keys, and reports the point under the cursor so that its legend can read it out.
 */
import { useSignal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { color, painted } from "../clock";

/** How far out of view a chart is drawn already: so a page of usual length is whole when it is printed. */
const NEAR = "1000px";

export interface ChartProps {
  /** Everything but the size; called again when `variant` or the colours change. */
  options: () => Omit<uPlot.Options, "width" | "height">;
  data: uPlot.AlignedData;
  height: number;
  /** What the picture shows, in a sentence, for those who do not see it. */
  summary: string;
  variant: string;
  onIndex?: (index: number | null) => void;
}

export function Chart({ options, data, height, summary, variant, onIndex }: ChartProps) {
  const host = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const latest = useRef(data);
  const seen = useSignal(false);
  const zoomed = useSignal(false);
  latest.current = data;

  useEffect(() => {
    const watcher = new IntersectionObserver((entries) => (seen.value = entries.some((entry) => entry.isIntersecting)), { rootMargin: NEAR });
    if (host.current) watcher.observe(host.current);
    return () => watcher.disconnect();
  }, []);

  const visible = seen.value;
  const paint = painted.value;
  useEffect(() => {
    const box = host.current;
    if (!box || !visible) return;
    const base = options();
    const chart = new uPlot({
      ...base,
      width: Math.max(120, box.clientWidth),
      height,
      legend: { show: false },
      hooks: {
        ...base.hooks,
        setCursor: [(u: uPlot) => onIndex?.(u.cursor.left !== undefined && u.cursor.left >= 0 ? (u.cursor.idx ?? null) : null)],
        setSelect: [(u: uPlot) => (zoomed.value = zoomed.value || u.select.width > 4)],
      },
    }, latest.current, box);
    plot.current = chart;
    const back = () => (zoomed.value = false);
    chart.over.addEventListener("dblclick", back);
    const resize = new ResizeObserver(() => chart.setSize({ width: Math.max(120, box.clientWidth), height }));
    resize.observe(box);
    return () => {
      resize.disconnect();
      chart.destroy();
      plot.current = null;
      zoomed.value = false;
    };
  }, [visible, paint, variant, height]);

  useEffect(() => {
    const chart = plot.current;
    if (!chart) return;
    chart.setData(data, !zoomed.value);
    if (zoomed.value) chart.redraw();
  }, [data]);

  const reset = () => {
    zoomed.value = false;
    plot.current?.setData(latest.current, true);
  };
  const keys = (event: KeyboardEvent) => {
    const chart = plot.current;
    if (!chart || (event.key !== "ArrowLeft" && event.key !== "ArrowRight")) return;
    event.preventDefault();
    const xs = chart.data[0];
    const step = (event.key === "ArrowLeft" ? -1 : 1) * (event.shiftKey ? Math.max(1, Math.round(xs.length / 20)) : 1);
    const index = Math.min(xs.length - 1, Math.max(0, (chart.cursor.idx ?? (step < 0 ? xs.length : -1)) + step));
    chart.setCursor({ left: chart.valToPos(xs[index] ?? 0, "x"), top: 10 });
  };

  return (
    <div class="chart" style={{ height: `${height}px` }}>
      <div ref={host} class="chart-host" role="img" aria-label={summary} tabIndex={0} onKeyDown={keys} />
      {zoomed.value && <button type="button" class="button chart-reset" onClick={reset}>Whole run</button>}
    </div>
  );
}

/** Axis looks that every chart shares. */
export function axis(extra: Partial<uPlot.Axis> = {}): uPlot.Axis {
  return {
    stroke: color("--muted"),
    font: `11px ${getComputedStyle(document.body).fontFamily}`,
    grid: { stroke: color("--grid"), width: 1 },
    ticks: { show: false },
    gap: 6,
    ...extra,
  };
}

/** Cursor looks that every chart shares; charts with the same key move together. */
export function cursor(key: string): uPlot.Cursor {
  return { y: false, drag: { x: true, y: false, setScale: true }, sync: { key }, points: { size: 7 }, focus: { prox: -1 } };
}
