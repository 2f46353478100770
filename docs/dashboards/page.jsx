// One dashboard, drawn by Grafana's own components from its JSON and from recorded answers to its queries. What Grafana
// does around them, asking, placing panels and naming series, is done here as far as our dashboards use it.
import "@fontsource/inter/400.css";
import "@fontsource/inter/500.css";
import {
  createTheme, dateTime, FieldType, getDisplayProcessor, getMinMaxAndDelta, LoadingState, toDataFrame,
} from "@grafana/data";
import { BigValue, GlobalStyles, PanelChrome, ThemeContext, TimeSeries } from "@grafana/ui";
import { createRoot } from "react-dom/client";

const WIDTH = 1440, COLUMNS = 24, GAP = 8, CELL_HEIGHT = 30, HEADER = 56;
const theme = createTheme({ colors: { mode: "dark" } });

// Settles once all is drawn: legends are measured, and graphs then drawn anew, frame by frame.
window.draw = async (board, recorded) => {
  const rows = Math.max(...board.panels.map(({ gridPos }) => gridPos.y + gridPos.h));
  document.body.style.cssText =
    `margin: 0; width: ${WIDTH}px; height: ${HEADER + rows * (CELL_HEIGHT + GAP) + GAP}px; position: relative;` +
    `background: ${theme.colors.background.canvas}; color: ${theme.colors.text.primary};` +
    `font: ${theme.typography.body.fontSize} ${theme.typography.fontFamily}`;
  createRoot(document.getElementById("board")).render(
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      <div style={{ ...theme.typography.h4, position: "absolute", left: GAP * 2, top: GAP * 2 }}>{board.title}</div>
      {board.panels.map((panel) => (
        <div key={panel.id} style={{ position: "absolute", ...box(panel.gridPos) }}>
          {panel.type === "row" ? <Row title={panel.title} /> : <Panel panel={panel} recorded={recorded} />}
        </div>
      ))}
    </ThemeContext.Provider>,
  );
  await document.fonts.ready;
  for (let frame = 0; frame < 20; frame++) {
    await new Promise(requestAnimationFrame);
  }
};

function box({ x, y, w, h }) {
  const column = (WIDTH - GAP) / COLUMNS;
  return {
    left: GAP + x * column, top: HEADER + y * (CELL_HEIGHT + GAP),
    width: w * column - GAP, height: h * CELL_HEIGHT + (h - 1) * GAP,
  };
}

const Row = ({ title }) => <div style={{ ...theme.typography.h5, padding: "4px 8px" }}>⌄ {title}</div>;

function Panel({ panel, recorded }) {
  const { width, height } = box(panel.gridPos);
  const frames = framesOf(panel, recorded);
  const Kind = { stat: Number, timeseries: Graph }[panel.type];
  return (
    <PanelChrome title={panel.title} width={width} height={height} loadingState={LoadingState.Done}>
      {(innerWidth, innerHeight) => (
        <Kind panel={panel} frames={frames} recorded={recorded} width={innerWidth} height={innerHeight} />
      )}
    </PanelChrome>
  );
}

// A frame a series: `labels` and `points` (Unix seconds, value) of each query, in the order of the targets.
function framesOf(panel, recorded) {
  const series = recorded.answers[panel.id].flatMap((found, number) =>
    found.map(({ labels, points }) => ({ name: legend(panel.targets[number].legendFormat, labels), points })),
  );
  return series.map(({ name, points }, number) => frameOf(panel, name, points, number, recorded.step));
}

const legend = (format, labels) => format.replace(/{{(\w+)}}/g, (_, label) => labels[label] ?? "");

function frameOf(panel, name, points, number, step) {
  const { defaults } = panel.fieldConfig;
  const isGraph = panel.type === "timeseries";
  const config = {
    ...defaults,
    displayNameFromDS: name,
    color: { mode: isGraph ? "palette-classic" : "thresholds" },
    thresholds: { ...defaults.thresholds, steps: lowestFirst(defaults.thresholds.steps) },
    custom: { drawStyle: "line", lineWidth: 1, lineInterpolation: "linear", axisPlacement: "auto", ...custom(defaults) },
  };
  const frame = toDataFrame({
    fields: [
      { name: "Time", type: FieldType.time, values: points.map(([at]) => at * 1000), config: { interval: step * 1000 } },
      { name: "Value", type: FieldType.number, values: points.map(([, value]) => value), config },
    ],
  });
  frame.refId = name;
  const [time, value] = frame.fields;
  value.state = { seriesIndex: number, displayName: name, range: getMinMaxAndDelta(value) };
  for (const field of [time, value]) {
    field.display = getDisplayProcessor({ field, theme });
  }
  return frame;
}

// JSON has no minus infinity.
const lowestFirst = (steps) => steps.map((step) => ({ ...step, value: step.value ?? -Infinity }));

// Stacking in Grafana is by group; "A" is the only one here.
const custom = ({ custom = {} }) =>
  custom.stacking ? { ...custom, stacking: { group: "A", ...custom.stacking } } : custom;

function Graph({ panel, frames, recorded, width, height }) {
  if (!frames.some(hasValues)) {
    return <Nothing text={panel.fieldConfig.defaults.noValue} />;
  }
  const [from, to] = [dateTime(recorded.from * 1000), dateTime(recorded.to * 1000)];
  return (
    <TimeSeries
      frames={frames} width={width} height={height} timeRange={{ from, to, raw: { from, to } }} timeZone="utc"
      legend={panel.options.legend} options={{}}
    />
  );
}

function Number({ panel, frames, width, height }) {
  const [, field] = frames.find(hasValues)?.fields ?? [];
  const last = field?.values.filter((value) => value !== null).at(-1);
  const value = field ? field.display(last) : { text: panel.fieldConfig.defaults.noValue, numeric: NaN };
  return (
    <BigValue
      value={value} width={width} height={height} theme={theme} colorMode={panel.options.colorMode}
      graphMode={panel.options.graphMode} justifyMode={panel.options.justifyMode} textMode="value"
      sparkline={field && { y: field }}
    />
  );
}

const hasValues = (frame) => frame.fields[1].values.some((value) => value !== null);

const Nothing = ({ text }) => (
  <div style={{ height: "100%", display: "grid", placeItems: "center", color: theme.colors.text.secondary }}>{text}</div>
);
