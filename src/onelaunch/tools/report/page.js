// Draws each figure from the specification that it holds. `charts` lets a test ask what is drawn.
const charts = {};
window.charts = charts;
const drawn = [...document.querySelectorAll("figure[id]")].map(async (figure) => {
  const spec = JSON.parse(figure.querySelector("script").textContent);
  const place = figure.querySelector(".chart > div"); // whose role the library sets
  try {
    const { view } = await vegaEmbed(place, spec, {
      renderer: "svg", // its colours are the page's, so that they follow the light and dark modes
      ast: true, // expressions are interpreted: the page allows no code made at run time
      actions: false,
      defaultStyle: false,
      tooltip: { disableDefaultStyle: true },
      bind: figure.querySelector(".controls"),
    });
    charts[figure.id] = view;
  } catch (error) {
    place.textContent = "This chart could not be drawn; its figures are below.";
    figure.querySelector("details").open = true;
    console.error(error);
  }
});
Promise.all(drawn).then(() => document.documentElement.setAttribute("data-drawn", drawn.length));
