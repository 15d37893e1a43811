//! What the run looked like, as SVG.

mod canvas;
mod layout;
mod loss;

pub(crate) use layout::layout;
pub(crate) use loss::loss;
