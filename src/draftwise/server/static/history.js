// Conversations of this browser: kept in its storage, never sent anywhere but in the requests that go on from them.

const KEY = "draftwise.conversations";
const MOST = 40; // conversations
const MOST_CHARACTERS = 1_500_000; // of all of them together: the storage has some five million

export class History {
  constructor() {
    this.list = load();
  }

  /** Keep a conversation, the newest first; the oldest make room. `messages` empty: forget it. */
  keep(id, messages, system) {
    this.list = this.list.filter((one) => one.id !== id);
    if (messages.length) this.list.unshift({ id, title: titleOf(messages), messages, system });
    this.#save();
  }

  forget(id) {
    this.keep(id, [], "");
  }

  find(id) {
    return this.list.find((one) => one.id === id) ?? null;
  }

  #save() {
    this.list = this.list.slice(0, MOST);
    let size = 0;
    this.list = this.list.filter((one, i) => {
      size += JSON.stringify(one).length;
      return i === 0 || size <= MOST_CHARACTERS;
    });
    try {
      localStorage.setItem(KEY, JSON.stringify(this.list));
    } catch {
      // Storage is off or full: they last as long as the page.
    }
  }
}

/** What is stored, if it is what this page stored. */
function load() {
  try {
    const found = JSON.parse(localStorage.getItem(KEY) ?? "[]");
    return Array.isArray(found) ? found.filter(isConversation) : [];
  } catch {
    return [];
  }
}

const isConversation = (one) =>
  typeof one?.id === "string" &&
  typeof one.title === "string" &&
  typeof one.system === "string" &&
  Array.isArray(one.messages) &&
  one.messages.every((m) => ["user", "assistant"].includes(m?.role) && typeof m.content === "string");

const titleOf = (messages) => {
  const first = messages[0].content.trim().split("\n")[0];
  return first.length > 48 ? `${first.slice(0, 47)}…` : first || "Conversation";
};

export const newId = () => `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 8)}`;
