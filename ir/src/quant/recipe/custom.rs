//! `Custom`: a format and a scaling for each operand.
//!
//! ```text
//! Custom(
//!     input: (format: E4M3, scaling: Current()),
//!     weight: (format: E4M3, scaling: Current(pow2: true)),
//! )
//! ```
//!
//! An operand that is left out stays in the compute type, and so do the GEMMs that read it: above, dgrad and
//! wgrad. In TransformerEngine a `qfactory` decides this.

use super::delayed::{check_history, check_margin};
use super::{GemmRole, QuantSpec, RecipeDef, RecipeError, Role, Scaling, require};
use crate::quant::Format;

recipe! {
    /// See the [module docs](self).
    pub struct Custom {
        /// `x`.
        pub input: Option<QuantSpec> = None,
        /// `W`.
        pub weight: Option<QuantSpec> = None,
        /// `dy`.
        pub grad: Option<QuantSpec> = None,
    }
}

impl RecipeDef for Custom {
    fn spec(&self, role: Role) -> Option<QuantSpec> {
        match role {
            Role::Input => self.input,
            Role::Weight => self.weight,
            Role::Grad => self.grad,
        }
    }

    fn check(&self) -> Result<(), RecipeError> {
        for role in Role::ALL {
            self.spec(role).map_or(Ok(()), |it| check(field(role), it))?;
        }
        // Tensor cores multiply E5M2 with E4M3 only, and blocks of 128x128 with those of 1x128.
        for gemm in GemmRole::ALL {
            let [left, right] = gemm.operands();
            let (Some(a), Some(b)) = (self.spec(left), self.spec(right)) else { continue };
            let (of, other) = (field(left), field(right));
            let both = |is: fn(QuantSpec) -> bool| is(a) && is(b);
            let expected = format!("E4M3 where that of {other} is E5M2: no GEMM takes two of it");
            let ok = !both(|it| it.format == Format::E5M2);
            require(ok, &format!("{of}.format"), "E5M2", &expected)?;
            let expected =
                format!("1 where those of {other} are 128: a GEMM takes one such operand");
            let ok = !both(|it| matches!(it.scaling, Scaling::Block { rows: 128, .. }));
            require(ok, &format!("{of}.scaling.rows"), 128, &expected)?;
        }
        // The transform cancels in wgrad only if both operands have it.
        let hadamard = |role| match self.spec(role).map(|it| it.scaling) {
            Some(Scaling::NvFp4 { hadamard, .. }) => hadamard,
            _ => false,
        };
        let [input, weight, grad] = Role::ALL.map(hadamard);
        let expected =
            "the same for input and grad, and false for weight: it cancels in wgrad only";
        require(input == grad && !weight, "input.scaling.hadamard", input, expected)
    }
}

fn field(role: Role) -> &'static str {
    match role {
        Role::Input => "input",
        Role::Weight => "weight",
        Role::Grad => "grad",
    }
}

fn check(operand: &str, spec: QuantSpec) -> Result<(), RecipeError> {
    let at = |field: &str| format!("{operand}.{field}");
    let formats: &[Format] = match spec.scaling {
        Scaling::NvFp4 { .. } => &[Format::E2M1],
        Scaling::Current { .. }
        | Scaling::Delayed { .. }
        | Scaling::Block { .. }
        | Scaling::Mx { .. } => &[Format::E4M3, Format::E5M2],
    };
    let names: Vec<String> = formats.iter().map(|it| format!("{it:?}")).collect();
    let expected = format!("{} with this scaling", names.join(" or "));
    let (format, known) = (format!("{:?}", spec.format), formats.contains(&spec.format));
    require(known, &at("format"), format, &expected)?;
    match spec.scaling {
        Scaling::Current { epsilon, .. } => {
            super::current::check_epsilon(&at("scaling.epsilon"), epsilon)
        }
        Scaling::Delayed { margin, history, .. } => {
            check_margin(&at("scaling.margin"), margin)?;
            check_history(&at("scaling.history"), history)
        }
        Scaling::Block { rows, columns, .. } => {
            require([1, 128].contains(&rows), &at("scaling.rows"), rows, "1 or 128")?;
            require(columns == 128, &at("scaling.columns"), columns, "128")
        }
        Scaling::Mx { .. } => Ok(()),
        Scaling::NvFp4 { two_dimensional, hadamard, stochastic } => {
            let expected = "false with blocks of 16x16, whose columns are not rounded again";
            require(!(two_dimensional && hadamard), &at("scaling.hadamard"), hadamard, expected)?;
            let weight = operand == field(Role::Weight);
            let expected =
                "false: a weight is rounded outside of a micro-batch, which has the seed";
            require(!(weight && stochastic), &at("scaling.stochastic"), stochastic, expected)
        }
    }
}
