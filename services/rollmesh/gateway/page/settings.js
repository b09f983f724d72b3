// The run's configuration, read when it is opened.
import * as api from "./api.js";
import { byId, setText } from "./dom.js";

export function startSettings(fail) {
  byId("settings-details").addEventListener("toggle", async () => {
    if (!byId("settings-details").open) return;
    try {
      setText(byId("settings-text"), (await api.settings()).yaml);
    } catch (error) {
      fail(error);
    }
  });
}
