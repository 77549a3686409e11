//! What an ONNX file does not say of itself, or says in its metadata under names of Skep's: what the
//! classes are called and how a picture becomes numbers.

use std::collections::BTreeMap;

use skep_learn::ImageForm;

use crate::ServeError;

/// What the user says of an ONNX file. What is left out comes from the file's metadata, or is what
/// is usual.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GraphSettings {
    /// The names of the classes, in the order of the scores (`skep.classes`).
    pub classes: Option<Vec<String>>,
    /// What is taken from a value, for each channel or for all (`skep.mean`).
    pub mean: Option<Vec<f32>>,
    /// What it is divided by then (`skep.std`).
    pub deviation: Option<Vec<f32>>,
    /// What a byte is divided by first (`skep.scale`).
    pub scale: Option<f32>,
    /// How the model's pictures were made (`skep.form`).
    pub form: Option<ImageForm>,
}

impl GraphSettings {
    /// The first flag that was given, if any was.
    pub(crate) fn given(&self) -> Option<&'static str> {
        let flags = [
            ("--classes", self.classes.is_some()),
            ("--mean", self.mean.is_some()),
            ("--std", self.deviation.is_some()),
            ("--scale", self.scale.is_some()),
            ("--form", self.form.is_some()),
        ];
        flags.into_iter().find_map(|(flag, given)| given.then_some(flag))
    }

    /// Fills up with what the file says. A file with properties of Skep's takes bytes as they are.
    pub(crate) fn or_metadata(
        mut self,
        metadata: &BTreeMap<String, String>,
    ) -> Result<Self, ServeError> {
        let refuse = |name: &str, error: String| {
            ServeError::model(
                format!("the metadata `{name}` of the ONNX file: {error}"),
                "set it again, or give the flag instead",
            )
        };
        for (name, text) in metadata {
            let fail = |error| refuse(name, error);
            match name.as_str() {
                "skep.classes" if self.classes.is_none() => {
                    self.classes = Some(names(text).map_err(fail)?);
                }
                "skep.mean" if self.mean.is_none() => {
                    self.mean = Some(numbers(text).map_err(fail)?);
                }
                "skep.std" if self.deviation.is_none() => {
                    self.deviation = Some(numbers(text).map_err(fail)?);
                }
                "skep.scale" if self.scale.is_none() => {
                    self.scale = Some(number(text).map_err(fail)?);
                }
                "skep.form" if self.form.is_none() => {
                    self.form = Some(form(text).map_err(fail)?);
                }
                _ => {}
            }
        }
        let own = metadata.keys().any(|name| name.starts_with("skep."));
        self.scale = self.scale.or(own.then_some(1.0));
        Ok(self)
    }
}

/// A list of JSON, or names in lines, or names with commas between them.
fn names(text: &str) -> Result<Vec<String>, String> {
    if text.trim_start().starts_with('[') {
        return serde_json::from_str(text).map_err(|error| error.to_string());
    }
    let separator = if text.trim().contains('\n') { '\n' } else { ',' };
    Ok(text.trim().split(separator).map(|name| name.trim().to_owned()).collect())
}

/// Numbers with commas between them, as in a list of JSON or without its brackets.
pub(crate) fn numbers(text: &str) -> Result<Vec<f32>, String> {
    let inner = text.trim().trim_start_matches('[').trim_end_matches(']');
    inner.split(',').map(number).collect()
}

fn number(text: &str) -> Result<f32, String> {
    let number = text.trim().parse::<f32>().ok().filter(|number| number.is_finite());
    number.ok_or_else(|| format!("`{text}` is not a number"))
}

/// `ink` or `photograph`.
fn form(text: &str) -> Result<ImageForm, String> {
    match text.trim() {
        "ink" => Ok(ImageForm::Ink),
        "photograph" => Ok(ImageForm::Photograph),
        other => Err(format!("`{other}` is neither `ink` nor `photograph`")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_go_before_metadata_and_metadata_before_what_is_usual() {
        let metadata = [
            ("skep.classes", "[\"cat\", \"dog, big\"]"),
            ("skep.mean", "0.1, 0.2,0.3"),
            ("skep.form", "ink"),
            ("author", "somebody"),
        ];
        let metadata = metadata.map(|(name, text)| (name.to_owned(), text.to_owned())).into();
        let own = GraphSettings { mean: Some(vec![0.5]), ..GraphSettings::default() };
        let all = own.or_metadata(&metadata).expect("good metadata");
        assert_eq!(all.classes, Some(vec!["cat".to_owned(), "dog, big".to_owned()]));
        assert_eq!((all.mean, all.deviation, all.scale), (Some(vec![0.5]), None, Some(1.0)));
        assert_eq!(all.form, Some(ImageForm::Ink));
        let none = GraphSettings::default().or_metadata(&BTreeMap::new()).expect("nothing");
        assert_eq!(none, GraphSettings::default());
        for (name, text) in [
            ("skep.classes", "[1"),
            ("skep.std", "1,x"),
            ("skep.scale", "inf"),
            ("skep.form", "oil"),
        ] {
            let metadata = BTreeMap::from([(name.to_owned(), text.to_owned())]);
            let error = GraphSettings::default().or_metadata(&metadata).expect_err(text);
            assert!(error.to_string().contains(name), "{error}");
        }
        assert_eq!(names("a\nb\n"), Ok(vec!["a".to_owned(), "b".to_owned()]));
        assert_eq!(names("a, b"), Ok(vec!["a".to_owned(), "b".to_owned()]));
    }
}
