// Runs before the first paint, so that the chosen theme does not flash; all other scripts are modules and load later.
(() => {
  const KEY = "rollmesh.theme";
  const NEXT = { system: "dark", dark: "light", light: "system" };
  const root = document.documentElement;

  const read = () => {
    try {
      return localStorage.getItem(KEY) in NEXT ? localStorage.getItem(KEY) : "system";
    } catch {
      return "system"; // storage may be disabled: use the system's theme
    }
  };

  const apply = (theme) => {
    if (theme === "system") delete root.dataset.theme;
    else root.dataset.theme = theme;
    const button = document.getElementById("theme");
    if (button) button.textContent = `Theme: ${theme}`;
  };

  const announce = () => root.dispatchEvent(new Event("themechange"));

  let theme = read();
  apply(theme);
  document.addEventListener("DOMContentLoaded", () => {
    apply(theme);
    document.getElementById("theme").addEventListener("click", () => {
      theme = NEXT[theme];
      try {
        localStorage.setItem(KEY, theme);
      } catch {
        // storage is disabled: the choice lasts until the page closes
      }
      apply(theme);
      announce();
    });
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", announce);
})();
