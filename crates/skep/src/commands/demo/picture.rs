//! Both curves with every kill, as an SVG that needs nothing else and fits light and dark pages.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use super::fire::Victim;
use super::proof::Findings;
use super::screen::Scene;
use crate::failure::Failure;
use crate::progress::thousands;

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 400.0;
const LEFT: f64 = 60.0;
const RIGHT: f64 = 840.0;
const TOP: f64 = 50.0;
const BOTTOM: f64 = 300.0;

const STYLE: &str = "text{font:14px system-ui,sans-serif;fill:#59636e}.figure{font-weight:600;fill:#1f2328}\
.grid{stroke:#d1d9e0}.calm{stroke:#0969da;stroke-width:7;opacity:.35}.chaos{stroke:#bf5b04;stroke-width:2}\
.point{fill:#bf5b04}polyline{fill:none;stroke-linejoin:round;stroke-linecap:round}.worker{stroke:#bf8700}.hive{fill:#cf222e}.paper{fill:#fff}\
@media(prefers-color-scheme:dark){text{fill:#9198a1}.figure{fill:#f0f6fc}.grid{stroke:#3d444d}\
.calm{stroke:#4493f8}.chaos{stroke:#f0a742}.point{fill:#f0a742}.worker{stroke:#d29922}.hive{fill:#f85149}.paper{fill:#0d1117}}";

/// Writes `chaos.svg` into a folder.
pub(super) fn save(folder: &Path, scene: &Scene, findings: &Findings) -> Result<PathBuf, Failure> {
    let path = folder.join("chaos.svg");
    std::fs::create_dir_all(folder)
        .and_then(|()| std::fs::write(&path, draw(scene, findings)))
        .map_err(|error| Failure::fault(format!("{}: {error}", path.display())))?;
    Ok(path)
}

fn draw(scene: &Scene, findings: &Findings) -> String {
    let reach = scene.reach() as f64;
    let x = |samples: u64| LEFT + (samples as f64 / reach).min(1.0) * (RIGHT - LEFT);
    let y = |share: f64| BOTTOM - share * (BOTTOM - TOP);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\">\
         <title>Accuracy with and without kills</title><style>{STYLE}</style>\
         <rect class=\"paper\" width=\"{WIDTH}\" height=\"{HEIGHT}\" rx=\"8\"/>\n"
    );
    let mut add = |text: std::fmt::Arguments<'_>| {
        // Writing into a string does not fail.
        let _ = svg.write_fmt(text);
        svg.push('\n');
    };
    for share in [0.0, 0.25, 0.5, 0.75, 1.0] {
        let (at, percent) = (y(share), share * 100.0);
        add(format_args!(
            "<path class=\"grid\" d=\"M{LEFT} {at}H{RIGHT}\"/><text x=\"{}\" y=\"{}\" \
             text-anchor=\"end\">{percent} %</text>",
            LEFT - 8.0,
            at + 5.0
        ));
    }
    for kill in &scene.kills {
        let at = x(kill.samples);
        match kill.victim {
            Victim::Worker(_) => {
                add(format_args!("<path class=\"worker\" d=\"M{at:.1} {}v10\"/>", BOTTOM + 8.0))
            }
            Victim::Hive => add(format_args!(
                "<path class=\"hive\" d=\"M{at:.1} {}l5 10h-10z\"/>",
                BOTTOM + 22.0
            )),
        }
    }
    for (class, measured) in [("calm", &scene.calm), ("chaos", &scene.chaos)] {
        for stretch in Scene::curve(measured) {
            let points: Vec<String> = stretch
                .iter()
                .map(|&(samples, share)| format!("{:.1},{:.1}", x(samples), y(share)))
                .collect();
            add(format_args!("<polyline class=\"{class}\" points=\"{}\"/>", points.join(" ")));
            for point in points.iter().filter(|_| class == "chaos") {
                let (cx, cy) = point.split_once(',').unwrap_or_default();
                add(format_args!("<circle class=\"point\" cx=\"{cx}\" cy=\"{cy}\" r=\"3\"/>"));
            }
        }
    }
    let legend = BOTTOM + 55.0;
    add(format_args!(
        "<path class=\"calm\" d=\"M{LEFT} {legend}h30\"/><text x=\"98\" y=\"{0}\">no kills</text>\
         <path class=\"chaos\" d=\"M180 {legend}h30\"/><text x=\"218\" y=\"{0}\">under fire</text>\
         <path class=\"worker\" d=\"M320 {1}v10\"/><text x=\"330\" y=\"{0}\">worker killed</text>\
         <path class=\"hive\" d=\"M445 {1}l5 10h-10z\"/><text x=\"456\" y=\"{0}\">hive killed</text>\
         <text x=\"{RIGHT}\" y=\"{0}\" text-anchor=\"end\">{2} samples</text>",
        legend + 5.0,
        legend - 5.0,
        thousands(scene.reach())
    ));
    let bits = if findings.bits_equal() { "the same bits" } else { "OTHER BITS" };
    add(format_args!(
        "<text class=\"figure\" x=\"{LEFT}\" y=\"28\">kills {}, lost {}, doubled {}; {bits}; {} \
         answers of the page, {} dropped</text>",
        findings.kills,
        findings.balance.lost,
        findings.balance.doubled,
        thousands(findings.probe.answered),
        findings.probe.dropped
    ));
    svg.push_str("</svg>\n");
    svg
}
