/* The build: one page, relative addresses (it may be served below a path prefix), no source maps in the wheel. */
import { defineConfig } from "vite";

declare const process: { env: Record<string, string | undefined> };

const service = process.env["RAYPS_URL"] ?? "http://127.0.0.1:8420";

export default defineConfig({
  base: "./",
  build: {
    outDir: "dist",
    emptyOutDir: true,
    sourcemap: false,
    target: ["chrome123", "firefox121", "safari17.5"],
    assetsInlineLimit: 0, // the service's content security policy allows files of its own, not data: addresses
    modulePreload: { polyfill: false },
  },
  server: {
    port: 5173,
    proxy: { "/api": { target: service, changeOrigin: true } },
  },
});
