// The API key of this tab: requests with it, and links to what needs it.

"use strict";

// The key is kept until the tab closes. Without a key requests have none.
function fetchWithKey(path) {
  const key = sessionStorage.getItem("key");
  return fetch(path, { headers: key ? { authorization: `Bearer ${key}` } : {} });
}

// A browser follows a link without headers, so a link marked `data-needs-key` is fetched with the
// key and its text shown.
document.addEventListener("click", async (event) => {
  const link = event.target.closest?.("a[data-needs-key]");
  if (!link || !sessionStorage.getItem("key")) return;
  event.preventDefault();
  const answer = await fetchWithKey(link.href);
  location.href = URL.createObjectURL(await answer.blob());
});
