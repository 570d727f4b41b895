// Conversations in the browser's database, where they stay until they are deleted. Knows nothing of what they hold.

const DATABASE = "truedraft";
const TALKS = "conversations";

let database = null; // null: this browser keeps nothing for this page
const tabs = new BroadcastChannel(DATABASE); // tells the other tabs of this page

const outcome = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

const table = (access) => database.transaction(TALKS, access).objectStore(TALKS);

/** Returns all that is kept, or null if this browser keeps nothing. */
export async function readAll() {
  try {
    const opening = indexedDB.open(DATABASE, 1);
    opening.onupgradeneeded = () => opening.result.createObjectStore(TALKS, { keyPath: "id" });
    database = await outcome(opening);
    database.onversionchange = () => database.close(); // someone deletes it
    return await outcome(table("readonly").getAll());
  } catch {
    database = null;
    return null;
  }
}

/** Returns whether it is kept. */
export async function write(talk) {
  try {
    await outcome(table("readwrite").put(talk));
    tabs.postMessage({ written: talk.id });
    return true;
  } catch {
    return false;
  }
}

export async function remove(id) {
  try {
    await outcome(table("readwrite").delete(id));
  } catch {
    // Nothing was kept, so nothing is left.
  }
  tabs.postMessage({ removed: id });
}

/** Tells of what other tabs write, with its new state, and of what they remove, with null. */
export function onOtherTabs(note) {
  tabs.addEventListener("message", async ({ data: { written, removed } }) => {
    if (removed) note(removed, null);
    else if (database) {
      const talk = await outcome(table("readonly").get(written)).catch(() => null);
      if (talk) note(written, talk);
    }
  });
}
