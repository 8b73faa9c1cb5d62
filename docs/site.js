// Code and tables that scroll can be reached with the keyboard.
document$.subscribe(() => {
  for (const part of document.querySelectorAll("pre > code, .md-typeset__scrollwrap")) {
    part.tabIndex = 0;
  }
});
