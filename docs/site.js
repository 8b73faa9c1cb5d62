// Code and tables that scroll can be reached with the keyboard.
document$.subscribe(() => {
  for (const part of document.querySelectorAll("pre > code, .md-typeset__scrollwrap")) {
    part.tabIndex = 0;
  }
});

// Pictures follow the page's colours, which the reader may have switched: their sources are for dark pages.
function matchPictures() {
  const dark = document.body.dataset.mdColorScheme === "slate";
  for (const source of document.querySelectorAll("picture > source")) {
    const narrow = source.srcset.includes("narrow") ? "(max-width: 40em)" : "all";
    source.media = dark === source.srcset.includes("dark") ? narrow : "not all";
  }
}
document$.subscribe(matchPictures);
new MutationObserver(matchPictures).observe(document.body, {
  attributeFilter: ["data-md-color-scheme"],
});
