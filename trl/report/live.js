// Ask the server for a newer page; put its tables, curves and samples into this one, where the reader's choices stay.
const parts = () => [...document.querySelectorAll("[data-live]")];
let version = null;
async function refresh() {
  try {
    const answer = await fetch("/", { cache: "no-store", headers: version ? { "If-None-Match": version } : {} });
    if (answer.status === 200) {
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html"), news = [...fresh.querySelectorAll("[data-live]")];
      if (news.length !== parts().length) { location.reload(); return; } // a section more, such as the first cost table
      parts().forEach((part, i) => { if (part.innerHTML !== news[i].innerHTML) part.innerHTML = news[i].innerHTML; });
      version = answer.headers.get("ETag");
      curves = JSON.parse(fresh.getElementById("curve-data").textContent);
      buildCurves();
      const samples = fresh.getElementById("sample-data").textContent, words = $("words");
      if (!words.contains(document.activeElement) && !inspector.querySelector(".token")) { data = JSON.parse(samples); buildSamples(); }
    }
    $("live").textContent = `live, last step ${Math.max(0, ...curves.arms.map((arm) => arm.at.step?.at(-1) ?? 0))}`;
  } catch (error) {
    if (!(error instanceof TypeError)) throw error; // a failed connection
    $("live").textContent = "the server is gone; this is its last state";
  }
  setTimeout(refresh, 1000 * Number(document.body.dataset.refresh));
}
refresh();
