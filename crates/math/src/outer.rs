//! The outer optimiser: how the average of models that were trained locally becomes the next
//! version. The negative of the averaged difference is taken for a gradient, so the step itself is
//! [`crate::Optimiser`]'s; these settings only say which one.

use serde::{Deserialize, Serialize};

use crate::error::MathError;
use crate::settings::{Kind, OptimiserSettings};

/// Which outer optimiser.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OuterKind {
    /// The average itself is the next version.
    #[default]
    None,
    /// A step towards the average, with or without momentum.
    Sgd,
    /// A step with Nesterov's momentum: DiLoCo.
    Nesterov,
}

/// The settings of an outer optimiser.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OuterSettings {
    /// Which one.
    pub kind: OuterKind,
    /// How far to go: 1 is the average. Default: 1 for sgd; for nesterov 0.7, or 0.9 in a short run.
    pub rate: Option<f64>,
    /// How much of the former step is kept. Default: 0 for sgd; for nesterov 0.9, or 0.5 in a short
    /// run.
    pub momentum: Option<f64>,
}

/// A run of fewer versions than this is a short one: DiLoCo's own momentum would still be
/// overshooting when it ends.
const SHORT: u64 = 100;

impl OuterSettings {
    /// The optimiser that steps by the negative of the averaged difference, in a run of so many
    /// versions, where that is known.
    ///
    /// # Errors
    /// Names the setting that is wrong, as `outer.rate`.
    pub fn optimiser(&self, versions: Option<u64>) -> Result<OptimiserSettings, MathError> {
        let (rate, momentum) = match self.kind {
            OuterKind::None => {
                let given = [("rate", self.rate), ("momentum", self.momentum)];
                if let Some((field, Some(value))) = given.iter().find(|(_, it)| it.is_some()) {
                    let allowed = "left out with none: it is for sgd, nesterov";
                    return Err(MathError::setting(format!("outer.{field}"), value, allowed));
                }
                (1.0, 0.0)
            }
            OuterKind::Sgd => (self.rate.unwrap_or(1.0), self.momentum.unwrap_or(0.0)),
            OuterKind::Nesterov => {
                let is_short = versions.is_some_and(|versions| versions < SHORT);
                let (rate, momentum) = if is_short { (0.9, 0.5) } else { (0.7, 0.9) };
                (self.rate.unwrap_or(rate), self.momentum.unwrap_or(momentum))
            }
        };
        let nesterov = self.kind == OuterKind::Nesterov;
        let settings =
            OptimiserSettings { rate, momentum, nesterov, ..OptimiserSettings::new(Kind::Sgd) };
        settings.validate().map_err(|error| match error {
            MathError::Setting { field, found, allowed } => {
                MathError::Setting { field: format!("outer.{field}"), found, allowed }
            }
            other => other,
        })?;
        Ok(settings)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &str) -> Result<OptimiserSettings, MathError> {
        serde_json::from_str::<OuterSettings>(json).unwrap().optimiser(None)
    }

    #[test]
    fn defaults_are_the_plain_average_and_diloco() {
        let none = read("{}").unwrap();
        assert_eq!((none.rate, none.momentum, none.nesterov), (1.0, 0.0, false));
        let diloco = read(r#"{"kind":"nesterov"}"#).unwrap();
        assert_eq!((diloco.rate, diloco.momentum, diloco.nesterov), (0.7, 0.9, true));
        let of = |versions| {
            let outer = OuterSettings { kind: OuterKind::Nesterov, ..OuterSettings::default() };
            let made = outer.optimiser(Some(versions)).unwrap();
            (made.rate, made.momentum)
        };
        assert_eq!((of(99), of(100)), ((0.9, 0.5), (0.7, 0.9)), "a short run, and one that is not");
        let sgd = read(r#"{"kind":"sgd","momentum":0.5}"#).unwrap();
        assert_eq!((sgd.rate, sgd.momentum, sgd.nesterov), (1.0, 0.5, false));
    }

    #[test]
    fn what_would_do_nothing_is_refused() {
        for (json, field) in [
            (r#"{"rate":1}"#, "outer.rate"),
            (r#"{"momentum":0.5}"#, "outer.momentum"),
            (r#"{"kind":"sgd","rate":-1}"#, "outer.rate"),
            (r#"{"kind":"nesterov","momentum":0}"#, "outer.nesterov"),
        ] {
            let error = read(json).unwrap_err().to_string();
            assert!(error.contains(field), "{json}: {error}");
        }
    }
}
