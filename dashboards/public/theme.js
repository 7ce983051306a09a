// Runs before the first paint, so that a chosen theme does not flash in the other one.
try {
  var theme = localStorage.getItem("rayps.theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch (e) {
  // Storage may be blocked: the system's theme then holds.
}
