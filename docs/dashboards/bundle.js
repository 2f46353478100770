// page.jsx with all that it imports, as build/page.js and build/page.css.
import { build } from "esbuild";

await build({
  entryPoints: ["page.jsx"],
  outfile: "build/page.js",
  bundle: true,
  jsx: "automatic",
  define: { "process.env.NODE_ENV": '"production"', global: "window" },
  loader: { ".woff": "dataurl", ".woff2": "dataurl", ".ttf": "empty" },  // .ttf: of an editor that no panel shows
  logLevel: "warning",
});
