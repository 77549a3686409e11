//! The table of results.

/// What a ratio should be.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Target {
    AtLeast(f64),
    AtMost(f64),
    /// Only reported.
    None,
}

/// One line of the table.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    what: String,
    ours: String,
    peer: String,
    value: Option<f64>,
    target: Target,
    skipped: Option<String>,
}

impl Row {
    pub(crate) fn new(what: &str, ours: String, peer: String, value: f64, target: Target) -> Self {
        let value = Some(value);
        Self { what: what.to_owned(), ours, peer, value, target, skipped: None }
    }

    /// A peer that is not on this machine.
    pub(crate) fn skipped(what: &str, why: &str) -> Self {
        Self {
            what: what.to_owned(),
            ours: String::new(),
            peer: String::new(),
            value: None,
            target: Target::None,
            skipped: Some(format!("skipped: {why}")),
        }
    }

    pub(crate) fn failed(what: &str, why: &str) -> Self {
        Self {
            target: Target::AtLeast(f64::INFINITY),
            skipped: Some(format!("failed: {why}")),
            ..Self::skipped(what, why)
        }
    }

    pub(crate) fn is_missed(&self) -> bool {
        match (self.value, self.target) {
            (Some(value), Target::AtLeast(target)) => value < target,
            (Some(value), Target::AtMost(target)) => value > target,
            (Some(_), Target::None) => false,
            (None, Target::None) => false,
            (None, _) => true,
        }
    }

    fn verdict(&self) -> &'static str {
        match (self.target, self.is_missed()) {
            (Target::None, _) => "",
            (_, true) => "MISSED",
            (_, false) => "ok",
        }
    }

    fn target_text(&self) -> String {
        match self.target {
            Target::AtLeast(target) if target.is_finite() => format!(">= {target}"),
            Target::AtMost(target) => format!("<= {target}"),
            _ => String::new(),
        }
    }
}

/// Prints the table in Markdown.
pub(crate) fn print(rows: &[Row]) {
    println!("| what | Skep | peer or limit | ratio | target | |");
    println!("|---|---|---|---|---|---|");
    for row in rows {
        let value = row.value.map_or(String::new(), |value| format!("{value:.2}"));
        let peer = row.skipped.as_deref().unwrap_or(&row.peer);
        println!(
            "| {} | {} | {peer} | {value} | {} | {} |",
            row.what,
            row.ours,
            row.target_text(),
            row.verdict()
        );
    }
}

/// The middle of several measurements.
pub(crate) fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
