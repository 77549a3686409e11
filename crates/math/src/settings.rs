//! An optimiser as a user writes it down. Names, defaults and meaning are PyTorch's where PyTorch
//! has the setting, so that a recipe carries over; what would silently do nothing is refused.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::error::MathError;
use crate::schedule::Schedule;

/// Which optimiser.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Gradient descent, with or without momentum.
    #[default]
    Sgd,
    /// Adam; weight decay is added to the gradient.
    Adam,
    /// Adam with decoupled weight decay.
    AdamW,
    /// RMSprop.
    RmsProp,
}

impl fmt::Display for Kind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Sgd => "sgd",
            Self::Adam => "adam",
            Self::AdamW => "adamw",
            Self::RmsProp => "rmsprop",
        })
    }
}

/// The settings of an optimiser. What is left out has PyTorch's default for its kind.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(from = "Draft")]
pub struct OptimiserSettings {
    /// Which optimiser.
    pub kind: Kind,
    /// The learning rate. Default: 0.01 for sgd and rmsprop, 0.001 for adam and adamw.
    pub rate: f64,
    /// For sgd and rmsprop.
    pub momentum: f64,
    /// For sgd with momentum.
    pub dampening: f64,
    /// For sgd with momentum.
    pub nesterov: bool,
    /// Decay of the weights: added to the gradient, except with adamw, where it shrinks the weights
    /// themselves. Default: 0.01 for adamw, 0 for the others.
    pub weight_decay: f64,
    /// For adam and adamw: how much of the averages of the gradient and of its square is kept.
    pub betas: [f64; 2],
    /// For all but sgd: added to the denominator.
    pub epsilon: f64,
    /// For rmsprop: how much of the average of the squared gradient is kept.
    pub alpha: f64,
    /// For rmsprop: normalise by the variance instead of the mean square.
    pub centred: bool,
    /// For adam and adamw: normalise by the largest average so far.
    pub amsgrad: bool,
    /// Scale the whole gradient down to this norm when it is longer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clip_norm: Option<f64>,
    /// How the rate changes over the run.
    pub schedule: Schedule,
    /// Settings of their own for groups of tensors.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub groups: BTreeMap<String, GroupSettings>,
}

/// What a group of tensors may have for itself.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GroupSettings {
    /// Its own learning rate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rate: Option<f64>,
    /// Or a factor on the optimiser's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rate_factor: Option<f64>,
    /// Its own weight decay.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight_decay: Option<f64>,
}

/// Settings as read, before the kind is known and with it the defaults.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, default, rename = "OptimiserSettings")]
struct Draft {
    kind: Kind,
    rate: Option<f64>,
    momentum: f64,
    dampening: f64,
    nesterov: bool,
    weight_decay: Option<f64>,
    betas: [f64; 2],
    epsilon: f64,
    alpha: f64,
    centred: bool,
    amsgrad: bool,
    clip_norm: Option<f64>,
    schedule: Schedule,
    groups: BTreeMap<String, GroupSettings>,
}

impl Default for Draft {
    fn default() -> Self {
        Self {
            kind: Kind::default(),
            rate: None,
            momentum: 0.0,
            dampening: 0.0,
            nesterov: false,
            weight_decay: None,
            betas: BETAS,
            epsilon: EPSILON,
            alpha: ALPHA,
            centred: false,
            amsgrad: false,
            clip_norm: None,
            schedule: Schedule::default(),
            groups: BTreeMap::new(),
        }
    }
}

const BETAS: [f64; 2] = [0.9, 0.999];
const EPSILON: f64 = 1e-8;
const ALPHA: f64 = 0.99;

impl From<Draft> for OptimiserSettings {
    fn from(draft: Draft) -> Self {
        let default_rate = match draft.kind {
            Kind::Sgd | Kind::RmsProp => 0.01,
            Kind::Adam | Kind::AdamW => 0.001,
        };
        let default_decay = if draft.kind == Kind::AdamW { 0.01 } else { 0.0 };
        Self {
            kind: draft.kind,
            rate: draft.rate.unwrap_or(default_rate),
            momentum: draft.momentum,
            dampening: draft.dampening,
            nesterov: draft.nesterov,
            weight_decay: draft.weight_decay.unwrap_or(default_decay),
            betas: draft.betas,
            epsilon: draft.epsilon,
            alpha: draft.alpha,
            centred: draft.centred,
            amsgrad: draft.amsgrad,
            clip_norm: draft.clip_norm,
            schedule: draft.schedule,
            groups: draft.groups,
        }
    }
}

impl Default for OptimiserSettings {
    fn default() -> Self {
        Self::new(Kind::default())
    }
}

/// A number's range, with the words for it.
struct Allowed {
    holds: fn(f64) -> bool,
    words: &'static str,
}

/// The loops run in `f32`, so what is infinite there is as bad as what is infinite here.
const NOT_NEGATIVE: Allowed = Allowed {
    holds: |value| value >= 0.0 && (value as f32).is_finite(),
    words: "a finite number of at least 0",
};
const POSITIVE: Allowed = Allowed {
    holds: |value| value > 0.0 && (value as f32).is_finite(),
    words: "a finite number greater than 0",
};
const BELOW_ONE: Allowed =
    Allowed { holds: |value| (0.0..1.0).contains(&value), words: "at least 0 and less than 1" };
const UP_TO_ONE: Allowed =
    Allowed { holds: |value| (0.0..=1.0).contains(&value), words: "from 0 to 1" };
/// Smaller ones are 0 in `f32`, and then a gradient of 0 divides 0 by 0.
const DIVISOR: Allowed = Allowed {
    holds: |value| (1e-37..=1.0).contains(&value),
    words: "greater than 0 (at least 1e-37) and at most 1",
};

fn check(field: impl Into<String>, value: f64, allowed: &Allowed) -> Result<(), MathError> {
    if (allowed.holds)(value) {
        Ok(())
    } else {
        Err(MathError::setting(field, value, allowed.words))
    }
}

impl OptimiserSettings {
    /// The defaults of a kind.
    #[must_use]
    pub fn new(kind: Kind) -> Self {
        Draft { kind, ..Draft::default() }.into()
    }

    /// Checks every setting by itself and together with the others.
    ///
    /// # Errors
    /// Names the first setting that is wrong and says what would be right.
    pub fn validate(&self) -> Result<(), MathError> {
        check("rate", self.rate, &NOT_NEGATIVE)?;
        check("momentum", self.momentum, &BELOW_ONE)?;
        check("dampening", self.dampening, &UP_TO_ONE)?;
        check("weight_decay", self.weight_decay, &NOT_NEGATIVE)?;
        check("betas[0]", self.betas[0], &BELOW_ONE)?;
        check("betas[1]", self.betas[1], &BELOW_ONE)?;
        check("epsilon", self.epsilon, &DIVISOR)?;
        check("alpha", self.alpha, &BELOW_ONE)?;
        if let Some(limit) = self.clip_norm {
            check("clip_norm", limit, &POSITIVE)?;
        }
        self.schedule.validate()?;
        for (name, group) in &self.groups {
            group.validate(&format!("groups.{name}"), self.rate)?;
        }
        self.refuse_idle_settings()
    }

    /// A setting that the kind does not have would be ignored, and its user misled.
    fn refuse_idle_settings(&self) -> Result<(), MathError> {
        use Kind::{Adam, AdamW, RmsProp, Sgd};
        let set: [(&str, bool, &[Kind]); 8] = [
            ("momentum", self.momentum != 0.0, &[Sgd, RmsProp]),
            ("dampening", self.dampening != 0.0, &[Sgd]),
            ("nesterov", self.nesterov, &[Sgd]),
            ("betas", self.betas != BETAS, &[Adam, AdamW]),
            ("amsgrad", self.amsgrad, &[Adam, AdamW]),
            ("alpha", self.alpha != ALPHA, &[RmsProp]),
            ("centred", self.centred, &[RmsProp]),
            ("epsilon", self.epsilon != EPSILON, &[Adam, AdamW, RmsProp]),
        ];
        for (field, is_set, kinds) in set {
            if is_set && !kinds.contains(&self.kind) {
                let kinds: Vec<String> = kinds.iter().map(Kind::to_string).collect();
                let allowed =
                    format!("left out with {}: it is for {}", self.kind, kinds.join(", "));
                return Err(MathError::setting(field, "set", allowed));
            }
        }
        if self.dampening != 0.0 && self.momentum == 0.0 {
            return Err(MathError::setting("dampening", self.dampening, "0 without momentum"));
        }
        if self.nesterov && (self.momentum == 0.0 || self.dampening != 0.0) {
            let allowed = "false, or used with a momentum and without dampening";
            return Err(MathError::setting("nesterov", true, allowed));
        }
        Ok(())
    }

    /// Checks that every group with settings of its own is one that the model has. An
    /// [`crate::Optimiser`] cannot do that by itself: it may hold a part of the model only.
    ///
    /// # Errors
    /// Names the group that does not exist and those that do.
    pub fn validate_groups<'a>(
        &self,
        known: impl IntoIterator<Item = &'a str>,
    ) -> Result<(), MathError> {
        let known: std::collections::BTreeSet<&str> = known.into_iter().collect();
        match self.groups.keys().find(|name| !known.contains(name.as_str())) {
            None => Ok(()),
            Some(name) => {
                let names: Vec<&str> = known.into_iter().collect();
                let allowed = format!("one of the model's groups ({})", names.join(", "));
                Err(MathError::setting("groups", format!("for `{name}`"), allowed))
            }
        }
    }

    /// These settings as they are at one step of a run of `total` steps, and constant from there on:
    /// for local training, during which the schedule stands still.
    #[must_use]
    pub fn at(&self, step: u64, total: Option<u64>) -> Self {
        let factor = self.schedule.factor(step, total);
        let mut settings = Self { schedule: Schedule::default(), ..self.clone() };
        settings.rate *= factor;
        for group in settings.groups.values_mut() {
            group.rate = group.rate.map(|rate| rate * factor);
        }
        settings
    }

    /// A group's rate, before the schedule, and its weight decay.
    pub(crate) fn resolve(&self, group: &str) -> (f64, f64) {
        let own = self.groups.get(group);
        let rate = own.and_then(|own| own.rate_within(self.rate)).unwrap_or(self.rate);
        let decay = own.and_then(|own| own.weight_decay).unwrap_or(self.weight_decay);
        (rate, decay)
    }
}

impl GroupSettings {
    fn validate(&self, path: &str, rate: f64) -> Result<(), MathError> {
        if let (Some(_), Some(factor)) = (self.rate, self.rate_factor) {
            let allowed = "left out where the group has a rate of its own";
            return Err(MathError::setting(format!("{path}.rate_factor"), factor, allowed));
        }
        if let Some(rate) = self.rate {
            check(format!("{path}.rate"), rate, &NOT_NEGATIVE)?;
        }
        if let Some(factor) = self.rate_factor {
            check(format!("{path}.rate_factor"), factor, &NOT_NEGATIVE)?;
            check(format!("{path}.rate_factor times rate"), factor * rate, &NOT_NEGATIVE)?;
        }
        if let Some(decay) = self.weight_decay {
            check(format!("{path}.weight_decay"), decay, &NOT_NEGATIVE)?;
        }
        Ok(())
    }

    fn rate_within(&self, rate: f64) -> Option<f64> {
        self.rate.or_else(|| self.rate_factor.map(|factor| factor * rate))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &str) -> OptimiserSettings {
        serde_json::from_str(json).unwrap()
    }

    #[test]
    fn defaults_are_those_of_the_kind() {
        assert_eq!(read("{}"), OptimiserSettings::default());
        assert_eq!(read("{}").rate, 0.01);
        assert_eq!(read(r#"{"kind":"adam"}"#).rate, 0.001);
        assert_eq!(read(r#"{"kind":"adam"}"#).weight_decay, 0.0);
        assert_eq!(read(r#"{"kind":"adamw"}"#).weight_decay, 0.01);
        assert_eq!(read(r#"{"kind":"adamw","weight_decay":0}"#).weight_decay, 0.0);
        for kind in [Kind::Sgd, Kind::Adam, Kind::AdamW, Kind::RmsProp] {
            assert_eq!(read(&format!(r#"{{"kind":"{kind}"}}"#)), OptimiserSettings::new(kind));
            assert_eq!(OptimiserSettings::new(kind).validate(), Ok(()));
        }
    }

    #[test]
    fn what_is_written_is_read_back() {
        let settings = read(
            r#"{"kind":"rmsprop","rate":0.5,"centred":true,"clip_norm":1,"momentum":0.5,
                "schedule":{"kind":"cosine","steps":9,"warm_up":2},
                "groups":{"head":{"rate_factor":2.0},"body":{"rate":1,"weight_decay":0.1}}}"#,
        );
        assert_eq!(settings.validate(), Ok(()));
        let written = serde_json::to_string(&settings).unwrap();
        assert_eq!(read(&written), settings);
        assert_eq!(settings.resolve("head"), (1.0, 0.0));
        assert_eq!(settings.resolve("body"), (1.0, 0.1));
        assert_eq!(settings.resolve("other"), (0.5, 0.0));
    }

    #[test]
    fn settings_at_a_step_have_its_rates() {
        let settings = read(
            r#"{"rate":0.5,"schedule":{"kind":"step","every":10},
                "groups":{"head":{"rate_factor":2.0},"body":{"rate":1}}}"#,
        );
        let then = settings.at(10, None);
        assert_eq!(then.schedule, Schedule::default());
        assert_eq!(then.resolve("other").0, 0.05);
        assert_eq!(then.resolve("head").0, 0.1);
        assert_eq!(then.resolve("body").0, 0.1);
    }

    #[test]
    fn a_misspelt_setting_is_refused_with_the_right_names() {
        let error = serde_json::from_str::<OptimiserSettings>(r#"{"lr":0.1}"#).unwrap_err();
        assert!(error.to_string().contains("`rate`"), "{error}");
        let group = r#"{"groups":{"head":{"lr":1}}}"#;
        assert!(serde_json::from_str::<OptimiserSettings>(group).is_err());
    }

    #[test]
    fn each_wrong_setting_is_named() {
        for (json, field) in [
            (r#"{"rate":-1}"#, "rate"),
            (r#"{"rate":1e39}"#, "rate"),
            (r#"{"momentum":1}"#, "momentum"),
            (r#"{"momentum":0.5,"dampening":1.1}"#, "dampening"),
            (r#"{"dampening":0.1}"#, "dampening"),
            (r#"{"nesterov":true}"#, "nesterov"),
            (r#"{"nesterov":true,"momentum":0.9,"dampening":0.1}"#, "nesterov"),
            (r#"{"weight_decay":-0.1}"#, "weight_decay"),
            (r#"{"kind":"adam","betas":[1,0.9]}"#, "betas[0]"),
            (r#"{"kind":"adam","betas":[0.9,-1]}"#, "betas[1]"),
            (r#"{"kind":"adam","epsilon":0}"#, "epsilon"),
            (r#"{"kind":"adam","epsilon":1e-50}"#, "epsilon"),
            (r#"{"kind":"adam","momentum":0.9}"#, "momentum"),
            (r#"{"kind":"adam","alpha":0.9}"#, "alpha"),
            (r#"{"kind":"adamw","centred":true}"#, "centred"),
            (r#"{"kind":"rmsprop","alpha":1}"#, "alpha"),
            (r#"{"kind":"rmsprop","nesterov":true,"momentum":0.9}"#, "nesterov"),
            (r#"{"kind":"rmsprop","momentum":0.9,"dampening":0.1}"#, "dampening"),
            (r#"{"betas":[0.8,0.9]}"#, "betas"),
            (r#"{"amsgrad":true}"#, "amsgrad"),
            (r#"{"epsilon":0.1}"#, "epsilon"),
            (r#"{"clip_norm":0}"#, "clip_norm"),
            (r#"{"schedule":{"kind":"step","every":0}}"#, "schedule.every"),
            (r#"{"groups":{"head":{"rate":-1}}}"#, "groups.head.rate"),
            (r#"{"groups":{"head":{"rate_factor":-1}}}"#, "groups.head.rate_factor"),
            (r#"{"groups":{"head":{"rate":1,"rate_factor":1}}}"#, "groups.head.rate_factor"),
            (r#"{"groups":{"head":{"weight_decay":-1}}}"#, "groups.head.weight_decay"),
        ] {
            match read(json).validate() {
                Err(MathError::Setting { field: named, .. }) => assert_eq!(named, field, "{json}"),
                other => panic!("{json}: {other:?}"),
            }
        }
        let not_a_number = OptimiserSettings { rate: f64::NAN, ..OptimiserSettings::default() };
        assert!(not_a_number.validate().is_err());
    }

    #[test]
    fn groups_that_the_model_lacks_are_named() {
        let settings = read(r#"{"groups":{"hed":{"rate":1}}}"#);
        let error = settings.validate_groups(["head", "body"]).unwrap_err().to_string();
        assert!(error.contains("`hed`") && error.contains("body, head"), "{error}");
        assert_eq!(settings.validate_groups(["hed"]), Ok(()));
    }
}
