//! [`RealRange`]: the real numbers that an attribute of an op, an init or a field of a model may be.
//!
//! Each range is written once, on the op or type that has the number. The model, plans and graphs ask there, so that
//! an edited program has no number that a `model.ron` could not have.

/// A set of real numbers. Ranks compute in f32, so a number must be in its range after rounding to f32 as well.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RealRange {
    /// Any finite number.
    Finite,
    /// Above 0 and finite.
    Positive,
    /// At least 0 and finite.
    NotNegative,
    /// A probability or a rate that leaves something: from 0 to below 1.
    Fraction,
    /// Above another number, and finite.
    Above {
        /// The name of the other number.
        name: &'static str,
        /// The value of the other number.
        bound: f64,
    },
}

/// A number with its name and the range that it must be in.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ranged {
    /// The attribute or field.
    pub name: &'static str,
    /// The value.
    pub value: f64,
    /// The range that it must be in.
    pub range: RealRange,
}

/// A number outside of its range.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{name}` is {found}, and must be {expected}")]
pub struct RangeError {
    /// The attribute or field.
    pub name: &'static str,
    /// The value that was found.
    pub found: String,
    /// The numbers that it may be.
    pub expected: String,
}

impl RealRange {
    /// Describes the range if `value` is not in it; `None` if it is.
    pub fn missed_by(self, value: f64) -> Option<String> {
        let rounded = f64::from(value as f32);
        if !self.contains(value, |it| it) {
            return Some(self.text());
        }
        let in_f32 = self.contains(rounded, |it| f64::from(it as f32));
        (!in_f32).then(|| format!("{}; in f32 it is {}", self.text(), number_text(rounded)))
    }

    fn contains(self, value: f64, rounded: impl Fn(f64) -> f64) -> bool {
        let in_range = match self {
            RealRange::Finite => true,
            RealRange::Positive => value > 0.0,
            RealRange::NotNegative => value >= 0.0,
            RealRange::Fraction => (0.0..1.0).contains(&value),
            RealRange::Above { bound, .. } => value > rounded(bound),
        };
        in_range && value.is_finite()
    }

    fn text(self) -> String {
        match self {
            RealRange::Finite => "finite".to_string(),
            RealRange::Positive => "more than 0 and finite".to_string(),
            RealRange::NotNegative => "at least 0 and finite".to_string(),
            RealRange::Fraction => "at least 0 and below 1".to_string(),
            RealRange::Above { name, bound } => {
                format!("more than {name}, which is {}", number_text(bound))
            }
        }
    }
}

impl Ranged {
    /// A number and its range.
    pub fn new(name: &'static str, value: impl Into<f64>, range: RealRange) -> Ranged {
        Ranged { name, value: value.into(), range }
    }

    /// An error unless the number is in its range.
    pub fn check(&self) -> Result<(), RangeError> {
        match self.range.missed_by(self.value) {
            None => Ok(()),
            Some(expected) => {
                Err(RangeError { name: self.name, found: number_text(self.value), expected })
            }
        }
    }
}

/// `1`, `0.5`, `1e21`.
pub(crate) fn number_text(value: f64) -> String {
    let text = format!("{value:?}");
    text.strip_suffix(".0").unwrap_or(&text).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Op;
    use crate::ops::OpKind;

    /// Wherever an op of any kind has a real attribute, NaN and infinity are refused.
    #[test]
    fn every_real_attribute_of_every_op_has_a_range() {
        let mut replaced = 0;
        for &kind in OpKind::ALL {
            for sample in kind.samples() {
                let text = sample.op.to_text();
                assert_eq!(
                    sample.op.numbers().iter().find(|it| it.check().is_err()),
                    None,
                    "{text}"
                );
                let starts = text.match_indices([':', '(']).map(|it| it.0 + 1);
                for start in starts.collect::<Vec<_>>() {
                    let rest = &text[start..];
                    let end = rest.find([',', ')', ':', '(']).unwrap_or(rest.len());
                    let real = rest[..end].contains('.') && rest[..end].parse::<f64>().is_ok();
                    for number in ["NaN", "inf"].iter().filter(|_| real) {
                        let edited = format!("{}{number}{}", &text[..start], &rest[end..]);
                        let op = Op::from_text(&edited).expect("it differs in a number only");
                        let refused = op.numbers().iter().any(|it| it.check().is_err());
                        assert!(refused, "{edited}");
                        replaced += 1;
                    }
                }
            }
        }
        assert!(replaced > 40, "{replaced}");
    }

    #[track_caller]
    fn check(range: RealRange, inside: &[f64], outside: &[f64]) {
        let missed = |it: &f64| range.missed_by(*it).is_some();
        assert_eq!(inside.iter().find(|it| missed(it)), None, "{range:?}");
        assert_eq!(outside.iter().find(|it| !missed(it)), None, "{range:?}");
    }

    #[test]
    fn a_number_is_in_its_range_in_f32_too() {
        let no_number = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1e300];
        let ranges = [RealRange::Finite, RealRange::Positive, RealRange::NotNegative];
        ranges.iter().for_each(|it| check(*it, &[1e-30, 1.0, 3e38], &no_number));
        check(RealRange::Positive, &[], &[0.0, -1.0, 1e-300]);
        check(RealRange::NotNegative, &[0.0, 1e-300], &[-1e-3]);
        check(RealRange::Fraction, &[0.0, 0.999999], &[1.0, -0.1, f64::NAN, 1.0 - 1e-12]);
        let above = RealRange::Above { name: "low", bound: 0.5 };
        check(above, &[0.6], &[0.5, 0.4, 0.5 + 1e-12, f64::INFINITY]);
    }
}
