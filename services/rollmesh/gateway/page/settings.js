// The run's configuration, read when it is opened: it needs the token, because its options may contain credentials.
import * as api from "./api.js";
import { byId, setText } from "./dom.js";

const NEEDS_TOKEN =
  "The configuration needs the token: enter it under Control, or open the page with the link that contains it.";

// attempt(read) reports an error of the read. Returns a function that reads the configuration again, as after the token
// was entered or removed.
export function startSettings(attempt) {
  const read = async () => {
    if (!byId("settings-details").open) return;
    try {
      setText(byId("settings-text"), (await api.settings()).yaml);
    } catch (error) {
      setText(byId("settings-text"), error.status === 401 ? NEEDS_TOKEN : "");
      throw error;
    }
  };
  const attemptRead = () => attempt(read);
  if (api.isFile) setText(byId("settings-details").firstElementChild, "Resolved run file, without its secrets");
  byId("settings-details").addEventListener("toggle", attemptRead);
  return attemptRead;
}
